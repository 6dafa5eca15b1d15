"""A recording keeps what a screen shows at its end."""

from benchmarks.pictures.terminal import on_screen


def test_lines_that_are_written_over_are_shown_once() -> None:
    assert on_screen("one\r\n 0%\r50%\r100%\r\n\x1b[1mtwo\x1b[0m  \r\n\r\n") == ["one", "100%", "two"]


def test_a_bar_of_several_lines_is_drawn_in_its_place() -> None:
    frames = [f"Epoch 0 {n}/2\r\n       loss: {n}" for n in range(3)]
    clear = "\r\x1b[2K\x1b[1A\x1b[2K"
    assert on_screen("this run\r\n" + clear.join(frames) + "\r\nend") == [
        "this run",
        "Epoch 0 2/2",
        "       loss: 2",
        "end",
    ]


def test_what_is_shorter_leaves_what_it_does_not_cover() -> None:
    assert on_screen("abcdef\rXY") == ["XYcdef"]
    assert on_screen("abcdef\rXY\x1b[K") == ["XY"]
