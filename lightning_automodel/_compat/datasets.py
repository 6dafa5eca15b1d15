"""Private names of Hugging Face's datasets."""


def is_split_by_node(dataset: object) -> bool:
    """Tells whether ``split_dataset_by_node`` gave this iterable dataset its share; it remembers so in private."""
    return getattr(dataset, "_distributed", None) is not None
