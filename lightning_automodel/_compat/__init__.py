"""Every use of a private name of another library, each with its reason and a test in ``tests/compat``.

What stands here may break with a new release of these libraries; what stands elsewhere should not.
"""
