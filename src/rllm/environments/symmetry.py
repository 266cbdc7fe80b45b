"""Images of boards: what is the same board, turned or seen in a mirror."""

from collections.abc import Iterable, Iterator, Sequence

Place = tuple[int, int]


def images_of(places: Iterable[Place], size: int) -> Iterator[list[Place]]:
    """The eight images of `places` (row, column) on a board of `size` rows; each keeps their order."""
    image = list(places)
    for _ in range(4):
        yield image
        yield [(row, size - 1 - column) for row, column in image]
        image = [(column, size - 1 - row) for row, column in image]


def smallest_image(rows: Sequence[str]) -> list[str]:
    """The first in the alphabet of the eight images of a drawing: all eight have the same."""
    images: list[list[str]] = []
    for rotation in (list(rows), ["".join(column) for column in zip(*rows, strict=True)]):
        for image in (rotation, [row[::-1] for row in rotation]):
            images += [image, image[::-1]]
    return min(images)


def smallest_drawing(rows: Sequence[str]) -> list[str]:
    """`smallest_image` of a square drawing; any other as it is, because turning changes its shape."""
    return smallest_image(rows) if {len(row) for row in rows} == {len(rows)} else list(rows)
