"""Names of what runs write, where derived data is cached, and writes that never leave a half-written file."""

import os
import tempfile
from pathlib import Path

TOKENIZER_FILE = "tokenizer.json"  # beside a model, or in the folder of its run
RUN_FILE = "run.json"  # of a training run: recipe and config
METRICS_FILE = "metrics.jsonl"  # of a run, or of all arms of a seed of a comparison
SUMMARY_FILE = "summary.json"  # its results
MODEL_FOLDER = "model"  # of a finished one
CHECKPOINTS_FOLDER = "checkpoints"
RECORD_FILE = "checkpoint.json"  # in each of them
RESULT_FILE = "result.json"  # in the model folder of each arm of a comparison


def default_cache_dir() -> Path:
    """Return the cache folder: ``$NAGNET_CACHE``, or ``~/.cache/nagnet``. It need not exist yet."""
    configured = os.environ.get("NAGNET_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "nagnet"


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees either the old content or all of the new one.

    Args:
        path: File to write; missing parent folders are created.
        content: The whole content.

    Raises:
        OSError: If the folder cannot be written; no temporary file stays behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Same folder: os.replace is atomic only within one file system.
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files private; follow the umask as an ordinary open() would.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)  # gone where an interrupt came right after the replacement
        raise
