"""Says whether what `make release-check` built may be uploaded.

python docs/site/release.py dist

One wheel and one source archive of the version in regard/version.py, a section of that version in the changelog, and in
both what is needed at run time: the page of the lens, the recipes, the specs of the grader, the small model. The wheel
holds nothing but the package.
"""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
NEEDED = (
    "lens/static/lens.js",
    "lens/small-model/model.safetensors",
    "recipes/lm.toml",
    "grade/specs/attention.toml",
    "py.typed",
)


def wrongs(dist: Path) -> list[str]:
    """Returns what stands in the way of a release, in words."""
    source = (ROOT / "regard" / "version.py").read_text(encoding="utf-8")
    version = source.split('__version__ = "')[1].split('"')[0]
    found = []
    wheels, archives = sorted(dist.glob("*.whl")), sorted(dist.glob("*.tar.gz"))
    if [p.name for p in wheels] != [f"regard-{version}-py3-none-any.whl"]:
        found.append(f"{dist}: expected one wheel of version {version}, found {[p.name for p in wheels]}")
    if [p.name for p in archives] != [f"regard-{version}.tar.gz"]:
        found.append(f"{dist}: expected one source archive of version {version}, found {[p.name for p in archives]}")
    if not re.search(rf"^## \[?{re.escape(version)}\]?", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M):
        found.append(f"CHANGELOG.md has no section {version}: name 'Unreleased' so, with the date")
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as file:
            names = file.namelist()
        found += [f"{wheel.name} lacks regard/{n}" for n in NEEDED if f"regard/{n}" not in names]
        found += [
            f"{wheel.name} has {n}" for n in names if not n.startswith(("regard/", f"regard-{version}.dist-info/"))
        ]
    for archive in archives:
        with tarfile.open(archive) as file:
            names = file.getnames()
        found += [f"{archive.name} lacks regard/{n}" for n in NEEDED if f"regard-{version}/regard/{n}" not in names]
    return found


def main() -> int:
    found = wrongs(Path(sys.argv[1]))
    print("\n".join(found) or "ready to upload")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
