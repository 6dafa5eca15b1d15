"""Runs test functions on several gloo ranks without paying the imports more than once per pytest session.

A test asks for the fixture `pool2` or `pool4` and hands it a function that stands at the top level of a module:

    def summed_rank(offset: int) -> float:              # runs on every rank; torch.distributed is initialized
        value = torch.tensor(float(dist.get_rank() + offset))
        dist.all_reduce(value)
        return value.item()

    def test_sum(pool4):
        assert pool4.run(summed_rank, 1) == [10.0] * 4  # one result per rank, in order

`run(fn, *args, timeout=60, trainer=False, with_directory=False, **kwargs)`:

- arguments and results are pickled (send plain tensors: `DTensor.full_tensor()`, not DTensors);
- `trainer=True`: no process group yet. The environment is that of a process started by torchrun, so a Lightning
  `Trainer(accelerator="cpu", devices=<ranks>)` or a plain `init_process_group("gloo")` makes its own;
- `with_directory=True`: `fn` also gets `directory=`, a `pathlib.Path` that its ranks share and that goes afterwards;
- an exception on any rank raises `RankFailed` at once, with that rank's traceback and the output of all of them;
- after `timeout` seconds `PoolTimeout` shows the Python stacks of all ranks.

How: one helper process (`nursery`) imports torch, transformers, lightning and lightning_automodel and then forks a
fresh process per rank for each call. So no call sees what an earlier one left behind (RNG, default dtype, environment,
warning filters, working directory, process groups, caches of DTensor and of the compiler), and a hung call costs
nothing but its own deadline. All ranks end with their call; all processes end with pytest, even when it is killed.
"""
