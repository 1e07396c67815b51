"""Makes memory-mapped rows of Criteo's Kaggle file: ``python experiments/dlrm/criteo_prepare.py train.txt``.

What was interrupted is continued, and the folder that comes of it is the same to the byte however often that was. Two
processes that want the same folder take turns. On the disk a row takes 160 bytes (7.3 GB for all of Kaggle's 45.8
million), and for a while a shard more; the text is read once.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # experiments/, where `dlrm` is

from rich.console import Console

from dlrm.criteo_folder import QUARANTINE, Folder, Manifest, PrepareSettings, folder_of
from dlrm.criteo_input import check_input
from dlrm.criteo_progress import StageProgress
from dlrm.criteo_stages import ON_ERROR, Preparation


def prepare(
    path: Path,
    cache_dir: Path,
    settings: PrepareSettings | None = None,
    on_error: str = "raise",
    show_progress: bool = True,
) -> Path:
    """Prepare a file, or continue to, unless that is done; a second process meanwhile waits.

    Args:
        path: The text, plain or gzip.
        cache_dir: Where the folder lies or comes to lie.
        settings: How; None for the defaults.
        on_error: ``raise`` stops at the first line that is no row; ``quarantine`` copies such lines to
            ``quarantine.tsv`` (number, reason, line), and of a damaged gzip file uses what can be read.
        show_progress: Show a progress bar, and a summary at the end.

    Returns:
        The folder.

    Raises:
        BadLineError: If a line is no row, under ``raise``.
        DamagedInputError: If a gzip file breaks off, under ``raise``.
        FileNotFoundError: If there is no such file.
        ValueError: If a setting, the input or the folder is no good.
    """
    if on_error not in ON_ERROR:
        raise ValueError(f"data.on_error={on_error!r}: choose one of {', '.join(ON_ERROR)}")
    check_input(path)
    settings = settings or PrepareSettings()
    folder = Folder(folder_of(path, cache_dir, settings))
    console = Console(stderr=True, quiet=not show_progress)
    with folder.locked():
        manifest = folder.read_manifest()
        if manifest and on_error == "raise" and (manifest.quarantined or manifest.damage):
            raise ValueError(
                f"data.path={path}: {manifest.quarantined} lines of it were set aside under {folder.root}, when it was "
                "read with data.on_error=quarantine; keep that setting, or repair the file"
            )
        if manifest is None or manifest.stage != "done":
            started = time.perf_counter()
            with StageProgress(console) as progress:
                preparation = Preparation(path, folder, settings, on_error, progress)
                preparation.run()
            seconds = time.perf_counter() - started
            console.print(f"{summary(preparation.manifest)}, in {seconds:.1f} s: {folder.root}")
    return folder.root


def summary(manifest: Manifest) -> str:
    """Say in a line what came of an input."""
    tables = sum(table.values for table in manifest.tables)
    text = f"{manifest.source['name']}: {manifest.rows:,} rows, {tables:,} category values kept"
    if stripped := sum(shard.stripped for shard in manifest.shards):
        text += f", {stripped:,} lines had lost their empty last fields"
    if manifest.quarantined:
        text += f", {manifest.quarantined:,} lines quarantined in {QUARANTINE}"
    if manifest.damage is not None:
        text += f", read only to where the gzip file is damaged ({manifest.damage})"
    return text


def main() -> None:
    """Prepare a file from the command line, as ``data=criteo`` with the same settings would."""
    defaults = PrepareSettings()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("path", type=Path, help="train.txt of Criteo's Kaggle challenge, plain or gzip")
    parser.add_argument("--cache-dir", type=Path, default=Path("outputs/cache"), help="data.cache_dir (%(default)s)")
    parser.add_argument("--days", type=int, default=defaults.days, help="data.days (%(default)s)")
    parser.add_argument("--min-count", type=int, default=defaults.min_count, help="data.min_count (%(default)s)")
    parser.add_argument("--max-rows-per-table", type=int, help="data.max_rows_per_table (no bound)")
    parser.add_argument("--shard-bytes", type=int, default=defaults.shard_bytes, help="data.shard_bytes (%(default)s)")
    parser.add_argument("--on-error", choices=ON_ERROR, default=ON_ERROR[0], help="data.on_error (%(default)s)")
    arguments = parser.parse_args()
    try:
        settings = PrepareSettings(
            arguments.days, arguments.min_count, arguments.max_rows_per_table, arguments.shard_bytes
        )
        print(prepare(arguments.path, arguments.cache_dir, settings, arguments.on_error))
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
