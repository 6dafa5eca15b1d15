"""The page of a run shows what the run has logged."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from lightning_automodel.cli import main
from lightning_automodel.command.logged_run import read_runs
from lightning_automodel.command.report import run_page
from tests.support import browser
from tests.support.markup import Page, is_alone

METRICS = """epoch,lr,step,train/loss,train/tokens,train/tokens_per_second,train/tokens_seen,val/loss,train/mfu,NORM
0,0.002,9,6.5,900,350.5,1000,,0.41,1.25
0,0.001,19,5.25,1900,360.5,2000,,0.43,inf
0,,19,,,,,5.75,,
""".replace("NORM", "train/gradient_norm")
HOSTILE = "run<img src=x onerror=alert(1)>"


def write_run(folder: Path, metrics: str = METRICS, lr: float = 0.002) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text(metrics)
    (folder / "config.yaml").write_text(f"model:\n  lr: {lr}\n  name: <b>tiny</b>\n")
    (folder / "start_table.txt").write_text("this run\n  strategy    DDPStrategy <one rank>\n")
    return folder


def test_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, output = write_run(tmp_path / HOSTILE), tmp_path / "page.html"
    main(["report", str(folder), f"--output={output}"])
    assert str(output) in capsys.readouterr().out
    markup = output.read_text()
    page = Page(markup)
    assert is_alone(page)
    assert page.rows["summary"] == [[HOSTILE, "19", "2,000", "5.25", "5.75", "355.5", "0.42"]]
    assert "DDPStrategy <one rank>" in page.text
    assert "name: <b>tiny</b>" in page.text
    for name in ("train/loss", "lr", "val/loss", "train/gradient_norm", "train/mfu"):
        assert markup.count(f'aria-label="{name} over steps"') == 1
        assert markup.count(f'aria-label="{name} over tokens"') == 1
    assert "train/tokens over" not in markup
    assert "train/tokens_seen over" not in markup


def test_runs_side_by_side(tmp_path: Path) -> None:
    write_run(tmp_path / "logs" / "version_2")
    write_run(tmp_path / "logs" / "version_10", METRICS.replace("5.25", "4.5"), lr=0.1)
    page = Page(run_page(read_runs([str(tmp_path / "logs")])))
    assert [row[0] for row in page.rows["summary"]] == ["version_2", "version_10"]
    assert [row[3] for row in page.rows["summary"]] == ["5.25", "4.5"]
    assert page.rows["differences"] == [["model.lr", "0.002", "0.1"]]


def test_a_resumed_run_takes_steps_again(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "epoch,step,train/loss\n0,9,3\n0,19,2\n0,9,2.5\n")
    (run,) = read_runs([str(folder)])
    assert run.numbers == {"train/loss": [(9.0, 2.5), (19.0, 2.0)]}
    assert 'over tokens"' not in run_page([run])


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "metrics.csv").write_text("epoch,train/loss\n0,1\n")
    (tmp_path / "empty").mkdir()
    for args, message in (
        ([], "missing: runs"),
        ([str(tmp_path / "none")], "is no directory"),
        ([str(tmp_path / "empty")], "has no metrics.csv"),
        ([str(broken)], "metrics.csv:2: there is no number of a step"),
        ([str(broken), "--out=x"], "did you mean --output?"),
    ):
        with pytest.raises(SystemExit):
            main(["report", *args])
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_events_of_tensorboard(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for step, loss in ((0, 3.0), (10, 2.5)):
            writer.add_scalar("train/loss", loss, step)
            writer.add_scalar("epoch", 0, step)
    (run,) = read_runs([str(tmp_path)])
    assert run.numbers == {"train/loss": [(0.0, 3.0), (10.0, 2.5)]}


@pytest.mark.skipif(browser.find() is None, reason="there is no Chromium on this machine")
def test_a_chart_says_what_is_below_the_pointer(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    main(["report", str(write_run(tmp_path / "run")), f"--output={file}"])
    move = """<script>
    const svg = document.querySelector('svg[aria-label="train/loss over steps"]'), box = svg.getBoundingClientRect();
    svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.right - 12, clientY: box.top + 20}));
    </script></body>"""
    file.write_text(file.read_text().replace("</body>", move))
    assert "<output>steps 19: 5.25</output>" in browser.dump(f"file://{file}")
