"""Every use of a private name of another library, each with its reason and a test in ``tests/compat``.

What stands here may break with a new release of these libraries; what stands elsewhere should not. A folder for each
that is used in many ways::

    torch/  dtensor/  fsdp2/  fake/     torch: itself, its tensors over ranks, its sharding, ranks that are only played
    lightning/                          its trainer, loops and strategies
    transformers/                       its models, and how it loads them

and a file for each of the others.
"""
