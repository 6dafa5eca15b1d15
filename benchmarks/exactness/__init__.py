"""Every family of transformers on a mesh against one process, gradient by gradient; writes docs/families.md."""
