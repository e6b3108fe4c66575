"""Files are whole or absent, also when the disk takes only a part."""

import resource
import subprocess
import sys

import pytest

from relax_agent.errors import StorageError
from relax_agent.files import append_to_file, replace_file, require_whole_safetensors

ON_A_FULL_DISK = """
import resource, sys
from pathlib import Path
from relax_agent.errors import StorageError
from relax_agent.files import append_to_file, replace_file
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    {call}(Path(sys.argv[1]), b"x" * 600 + b"y" * 600)
except StorageError as error:
    sys.exit(str(error))
"""


def fill(call, path):
    """Write more than fits, in a process whose files may not grow beyond 1000 bytes."""
    code = ON_A_FULL_DISK.format(call=call)
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    return done.stderr.strip()


def test_data_is_added_at_the_end(tmp_path):
    path = tmp_path / "log"
    append_to_file(path, b"one\n")
    append_to_file(path, b"")
    append_to_file(path, b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="needs a limit on file sizes")
def test_an_addition_that_does_not_fit_leaves_what_was_there(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"one\n")
    said = fill("append_to_file", path)
    assert said == f"cannot write {path}: File too large → free space and resume the run"
    assert path.read_bytes() == b"one\n"


def test_a_file_that_cannot_be_replaced_stays_as_it_was(tmp_path):
    path = tmp_path / "state"
    replace_file(path, b"old")
    assert "File too large" in fill("replace_file", path)
    assert path.read_bytes() == b"old"
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert [each.name for each in tmp_path.iterdir()] == ["state"]


@pytest.mark.parametrize("write", [append_to_file, replace_file])
def test_a_missing_folder_is_a_storage_error(write, tmp_path):
    with pytest.raises(StorageError, match="No such file or directory"):
        write(tmp_path / "nowhere" / "file", b"")


def test_a_whole_safetensors_file_passes_and_every_shorter_one_does_not(tmp_path):
    import numpy as np
    from safetensors.numpy import save

    path = tmp_path / "a.safetensors"
    data = save({"a": np.arange(6.0), "b": np.zeros((0, 3))}, {"format": "pt"})
    path.write_bytes(data)
    require_whole_safetensors(path)
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"a\.safetensors|JSON|Expecting|delimiter"):
            require_whole_safetensors(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(ValueError, match="bytes instead of"):
        require_whole_safetensors(path)
