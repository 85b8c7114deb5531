"""Folders of images: every pixel where it was, classes numbered alike, damage named."""

import h5py
import numpy as np
import pytest

from mpiflow.errors import DataError
from mpiflow.io.pack import pack
from mpiflow.io.pack.images import ImageFolder
from mpiflow.io.pack.names import Numbering

Image = pytest.importorskip("PIL.Image")


def draw(shape, seed):
    return np.random.RandomState(seed).randint(0, 256, shape).astype(np.uint8)


@pytest.fixture
def folder(tmp_path):
    """Two classes of 3 and 2 images of 5 x 4 pixels; gives the folder and the pixels in order."""
    pixels = [draw((4, 5, 3), seed) for seed in range(5)]
    for name, image in zip(("cat/1", "cat/a/2", "cat/b", "dog/0", "dog/1"), pixels, strict=True):
        path = tmp_path / "photos" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    (tmp_path / "photos/cat/notes.txt").write_text("no image")
    (tmp_path / "photos/.hidden").mkdir()
    return tmp_path / "photos", np.stack(pixels).transpose(0, 3, 1, 2)


def test_every_image_is_a_row_with_the_number_of_its_class(folder):
    rows = ImageFolder(folder[0])
    assert (len(rows), [path.rpartition("/")[2] for path in rows.ignored]) == (5, ["notes.txt"])
    # Of each folder its own files first.
    order = [0, 2, 1, 3, 4]
    taken = rows.take(slice(0, 5))
    assert np.array_equal(taken["image"], folder[1][order])
    assert (taken["label"].tolist(), taken["label"].dtype) == ([0, 0, 0, 1, 1], np.uint16)
    some = rows.take(np.array([4, 1]))
    assert np.array_equal(some["image"], folder[1][[4, 2]])
    assert some["label"].tolist() == [1, 0]


def test_gray_images_have_one_channel(folder):
    image = ImageFolder(folder[0], channels=1).take(slice(0, 1))["image"]
    weighted = (folder[1][0] * np.array([0.299, 0.587, 0.114])[:, None, None]).sum(0)
    assert image.shape == (1, 1, 4, 5)
    assert np.abs(image[0, 0] - weighted).max() <= 1


@pytest.mark.parametrize(("fit", "edge"), [("crop", 200), ("pad", 0), ("stretch", 10)])
def test_images_are_fitted_to_a_size(tmp_path, fit, edge):
    image = np.full((8, 16, 3), 10, np.uint8)
    image[:, 4:12] = 200  # the square in the middle
    (tmp_path / "one").mkdir()
    Image.fromarray(image).save(tmp_path / "one/a.png")
    found = ImageFolder(tmp_path, size=(4, 4), fit=fit).take(slice(0, 1))["image"]
    assert found.shape == (1, 3, 4, 4)
    assert abs(int(found[0, 0, 0, 0]) - edge) < 60
    assert (found[0, :, 1:3, 1:3] > 150).all()


def test_an_image_is_turned_as_its_camera_was(tmp_path):
    (tmp_path / "one").mkdir()
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise
    pixels = draw((2, 3, 3), 0)
    Image.fromarray(pixels).save(tmp_path / "one/a.png", exif=exif)
    found = ImageFolder(tmp_path).take(slice(0, 1))["image"][0]
    assert np.array_equal(found.transpose(1, 2, 0), np.rot90(pixels, -1))


def test_unequal_sizes_are_named_with_both_files(folder):
    Image.fromarray(draw((4, 6, 3), 0)).save(folder[0] / "dog/2.png")
    with pytest.raises(DataError, match=r"dog/2\.png has 6x4 pixels, .*cat/1\.png 5x4.*--size"):
        pack(ImageFolder(folder[0]), folder[0].parent / "x.h5")
    assert ImageFolder(folder[0], size=(4, 4)).take(slice(0, 6))["image"].shape == (6, 3, 4, 4)


def test_damaged_and_deep_images_are_named(folder):
    good = (folder[0] / "dog/0.png").read_bytes()
    (folder[0] / "dog/0.png").write_bytes(good[: len(good) // 2])
    with pytest.raises(DataError, match=r"dog/0\.png: not an image that can be read"):
        ImageFolder(folder[0]).take(slice(0, 5))
    Image.fromarray(np.full((4, 5), 40_000, np.uint16)).save(folder[0] / "dog/0.png")
    with pytest.raises(DataError, match=r"dog/0\.png: .*more than 8 bits a pixel"):
        ImageFolder(folder[0]).take(slice(0, 5))


def test_folders_without_classes_or_images_are_refused(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        ImageFolder(tmp_path / "gone")
    Image.fromarray(draw((2, 2, 3), 0)).save(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"no folders, and every class needs one"):
        ImageFolder(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: no image in this class"):
        ImageFolder(tmp_path)


def test_classes_packed_later_have_the_numbers_of_the_first(folder, tmp_path):
    names = Numbering(tmp_path / "classes.txt")
    ImageFolder(folder[0], classes=names)
    assert names.files() == {tmp_path / "classes.txt": "cat\ndog\n"}
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    other = tmp_path / "other"
    (other / "dog").mkdir(parents=True)
    Image.fromarray(draw((4, 5, 3), 0)).save(other / "dog/1.png")
    rows = ImageFolder(other, classes=Numbering(tmp_path / "classes.txt"))
    assert rows.take(slice(0, 1))["label"].tolist() == [1]
    (other / "dog").rename(other / "eel")
    with pytest.raises(DataError, match=r"'eel' is not among the 2 names in .*classes\.txt"):
        ImageFolder(other, classes=Numbering(tmp_path / "classes.txt"))


def test_images_are_packed_shuffled_and_divided(folder, tmp_path):
    pack(ImageFolder(folder[0]), tmp_path / "out", test=2, shuffle=True)
    found = []
    for name in ("train", "test"):
        with h5py.File(tmp_path / f"out/{name}-000.h5") as file:
            found += [image.tobytes() for image in file["image"]]
    assert sorted(found) == sorted(image.tobytes() for image in folder[1])
