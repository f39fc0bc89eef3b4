"""Source packages of Debian, got without a change to the machine's list of sources."""

import pathlib
import re
import shutil
import subprocess

from product import BUILD
from ways import Failed

KEPT = BUILD / "programs" / "sources"


def source_lists():
    """The machine's own places of Debian packages, as places of sources."""
    found = []
    for path in sorted(pathlib.Path("/etc/apt").rglob("*.sources")):
        for stanza in re.split(r"\n\s*\n", path.read_text()):
            if re.search(r"^Types:.*\bdeb\b", stanza, re.M) and "Debian" not in stanza and "debian" not in stanza:
                continue
            if re.search(r"^Types:.*\bdeb\b", stanza, re.M):
                found.append((".sources", re.sub(r"^Types:.*$", "Types: deb-src", stanza, flags=re.M)))
    for path in [pathlib.Path("/etc/apt/sources.list"), *pathlib.Path("/etc/apt").glob("sources.list.d/*.list")]:
        if path.exists():
            lines = re.findall(r"^deb (.*debian.*)$", path.read_text(), re.M)
            found += [(".list", f"deb-src {line}") for line in lines]
    return found


def apt(at, *command):
    done = subprocess.run(command, cwd=at, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise Failed(f"{' '.join(command[:2])} for {at.name}: {done.stderr[-2000:]}")
    return done.stdout


def source(package, binary=None):
    """The folder with the unpacked source of a package; got once. In the version that is installed, or where there is
    none of that the next best, whose tests may fail natively too."""
    at = KEPT / package
    unpacked = [path for path in at.glob("*/") if (path / "debian").is_dir()]
    if unpacked:
        return unpacked[0]
    shutil.rmtree(at, ignore_errors=True)
    lists = at / "apt" / "sources.list.d"
    lists.mkdir(parents=True)
    (at / "apt" / "lists" / "partial").mkdir(parents=True)
    for number, (ending, text) in enumerate(source_lists()):
        (lists / f"{number}{ending}").write_text(text + "\n")
    options = [f"-oDir::Etc::SourceList={at / 'none'}", f"-oDir::Etc::SourceParts={lists}",
               f"-oDir::State::Lists={at / 'apt' / 'lists'}", "-oAPT::Sandbox::User=root", "--quiet=2"]
    apt(at, "apt-get", "update", *options)
    installed = apt(at, "dpkg-query", "--show", "--showformat", "${source:Version}", binary or package)
    others = re.findall(r"^Version: (.*)$", apt(at, "apt-cache", *options, "showsrc", package), re.M)
    failure = None
    for version in [installed, *reversed(others)]:
        try:
            apt(at, "apt-get", "source", *options, f"{package}={version}")
        except Failed as error:
            failure = failure or error
            continue
        shutil.rmtree(at / "apt")
        return next(path for path in at.glob("*/") if (path / "debian").is_dir())
    raise failure
