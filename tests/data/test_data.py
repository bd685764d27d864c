"""The reader of MNIST: found, checked, refused with a clear word."""

import errno
import gzip
import hashlib
import http.client
import urllib.error
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sketchprop import data
from sketchprop.core.cache import cache_folder
from sketchprop.data import digits, files


def idx(shape, content):
    sizes = b"".join(size.to_bytes(4, "big") for size in shape)
    return b"\0\0\x08" + bytes([len(shape)]) + sizes + content


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A small stand-in for MNIST with its own checksums, and a cache folder of its own."""
    files = {
        "train-images-idx3-ubyte": idx((2, 2, 3), bytes(range(12))),
        "train-labels-idx1-ubyte": idx((2,), bytes([7, 1])),
    }
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    monkeypatch.setattr(digits, "MNIST_SHA256", sums)
    root = tmp_path / "data"
    (root / "mnist").mkdir(parents=True)
    for name, content in files.items():
        (root / "mnist" / f"{name}.gz").write_bytes(gzip.compress(content))
    monkeypatch.setenv("SKETCHPROP_DATA", str(root))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return root


@pytest.fixture
def offline(monkeypatch):
    def refuse(*args, **kwargs):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(files.urllib.request, "urlopen", refuse)


def check(images, labels):
    assert images.dtype == torch.uint8
    assert images.tolist() == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]
    assert labels.dtype == torch.int64
    assert labels.tolist() == [7, 1]


@pytest.mark.parametrize("layout", ["parent", "itself", "unpacked", "cache"])
def test_found_in_every_documented_place(folder, offline, monkeypatch, layout):
    if layout == "itself":
        monkeypatch.setenv("SKETCHPROP_DATA", str(folder / "mnist"))
    if layout == "unpacked":
        for packed in (folder / "mnist").glob("*.gz"):
            packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
            packed.unlink()
    if layout == "cache":
        monkeypatch.delenv("SKETCHPROP_DATA")
        cache_folder().mkdir(parents=True)
        (folder / "mnist").rename(cache_folder() / "mnist")
    check(*data.mnist())


def test_a_damaged_file_is_refused(folder):
    path = folder / "mnist" / "train-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(idx((2,), bytes([7, 2]))))
    with pytest.raises(data.DataError, match=r"SHA-256.*damaged"):
        data.mnist()
    path.write_bytes(path.read_bytes()[:-6])
    with pytest.raises(data.DataError, match="cannot be unpacked"):
        data.mnist()


def test_without_network_the_error_says_what_to_do(folder, offline):
    for path in (folder / "mnist").iterdir():
        path.unlink()
    with pytest.raises(data.DataError, match=r"no network.*SKETCHPROP_DATA="):
        data.mnist()
    with pytest.raises(data.DataError, match="downloading was not asked for"):
        data.mnist(download=False)


def test_a_download_is_checked_and_cached(folder, monkeypatch):
    source = {p.name: p.read_bytes() for p in (folder / "mnist").iterdir()}
    for path in (folder / "mnist").iterdir():
        path.unlink()
    asked = []

    class Answer:
        def __init__(self, content):
            self.content = content

        def __enter__(self):
            return self

        def __exit__(self, *args):
            pass

        def read(self, most):
            return self.content[:most]

    def serve(url, timeout):
        asked.append(url)
        good = url.startswith(digits.MNIST_MIRRORS[1])
        return Answer(source[url.rsplit("/", 1)[1]] if good else b"<html>moved</html>")

    monkeypatch.setattr(files.urllib.request, "urlopen", serve)
    check(*data.mnist())
    assert len(asked) == 4  # both mirrors for both files
    check(*data.mnist())
    assert len(asked) == 4
    assert not list(cache_folder().rglob("*.part"))


def test_a_cut_idx_file_is_refused():
    with pytest.raises(data.DataError, match="needs 6 bytes of data and has 5"):
        data.parse_idx(idx((2, 3), bytes(5)))
    with pytest.raises(data.DataError, match="not an IDX file"):
        data.parse_idx(b"GIF89a")


@pytest.mark.parametrize(
    "content",
    [
        b"\0\0\x08\x03\0\0",  # cut within its sizes
        b"\0\0\x08\xff",
        idx((0, 28, 28), b""),
        idx((), b"a"),
        idx((1,) * 70, b"a"),
    ],
)
def test_idx_files_without_pictures_are_refused(content):
    with pytest.raises(data.DataError, match="cut or damaged"):
        data.parse_idx(content)


def test_a_small_file_does_not_unpack_to_a_huge_one(folder):
    path = folder / "mnist" / "train-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(bytes(1 << 27)))
    assert path.stat().st_size < 1 << 18
    with pytest.raises(data.DataError, match="holds more than 67108864 bytes"):
        data.mnist()


def test_a_download_that_breaks_off_is_refused(folder, monkeypatch):
    for path in (folder / "mnist").iterdir():
        path.unlink()

    def broken(url, timeout):
        raise http.client.IncompleteRead(b"half")

    monkeypatch.setattr(files.urllib.request, "urlopen", broken)
    with pytest.raises(data.DataError, match=r"IncompleteRead.*SKETCHPROP_DATA="):
        data.mnist()


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(self, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.Path, "replace", full)
    with pytest.warns(UserWarning, match="No space left"):
        files.keep(b"content", tmp_path / "cache" / "file")
    assert not list((tmp_path / "cache").iterdir())


def test_two_writers_of_one_cache_never_show_half_a_file(tmp_path):
    path, size = tmp_path / "file", 1 << 16
    seen = set()

    def write(letter):
        for _ in range(30):
            files.keep(letter * size, path)
            seen.add(path.read_bytes())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, (b"a", b"b", b"c", b"d")))
    assert seen <= {letter * size for letter in (b"a", b"b", b"c", b"d")}
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_file_that_another_process_removes_meanwhile_counts_as_missing(folder, monkeypatch):
    monkeypatch.setattr(files.Path, "is_file", lambda self: True)
    assert files.read(folder / "gone") is None


def test_a_folder_without_access_is_named(folder, monkeypatch):
    def refuse(self):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(files.Path, "read_bytes", refuse)
    with pytest.raises(data.DataError, match=r"mnist.*Permission denied.*SKETCHPROP_DATA="):
        data.mnist(download=False)


def test_a_home_that_does_not_exist_is_named(monkeypatch):
    monkeypatch.setenv("SKETCHPROP_DATA", "~nobody-has-this-name/data")
    with pytest.raises(data.DataError, match="Give the whole path"):
        data.mnist(download=False)


def test_the_real_digits():
    try:
        images, labels = data.mnist(train=False, download=False)
    except data.DataError as error:
        pytest.skip(f"MNIST is not here: {error}")
    assert images.shape == (10_000, 28, 28)
    assert labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    rows = data.normalised(images)
    assert abs(float(rows.mean())) < 1e-4
    assert float(rows.std()) == pytest.approx(1, abs=1e-4)
