"""Private names of Hugging Face's datasets."""


def is_split_by_node(dataset: object) -> bool:
    """Tells whether ``split_dataset_by_node`` gave this iterable dataset its share; it remembers so in private."""
    return getattr(dataset, "_distributed", None) is not None


def forget_starting_state(dataset: object) -> None:
    """Let the next pass of an iterable dataset begin at its beginning: a state that was loaded into it holds for every
    pass of the same epoch, and only ``set_epoch`` ends that.
    """
    if getattr(dataset, "_starting_state_dict", None) is not None:
        dataset._starting_state_dict = None  # type: ignore[attr-defined]
