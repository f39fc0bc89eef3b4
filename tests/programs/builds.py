"""git, gcc and cargo: what they make is the same to the last byte."""

import hashlib
import pathlib
import random
import shutil
import subprocess

import product
from ways import Case

# Functions of the C file.
FUNCTIONS = 200


def digest_of(path):
    return hashlib.blake2b(pathlib.Path(path).read_bytes(), digest_size=16).hexdigest()


def git_environment():
    return product.clean_environment(GIT_CONFIG_GLOBAL="/dev/null", GIT_CONFIG_NOSYSTEM="1")


def big_repository(at):
    """A repository with sixty commits over some files of half a megabyte."""
    if (at / "HEAD").exists():
        return at
    shutil.rmtree(at, ignore_errors=True)
    at.mkdir(parents=True)
    chance = random.Random(3)
    words = [bytes(chance.choices(b"abcdefghijklmnopqrstuvwxyz", k=chance.randrange(2, 12))) for _ in range(20_000)]
    files = [[b" ".join(chance.choices(words, k=9)) for _ in range(8000)] for _ in range(12)]
    stream = []
    for commit in range(60):
        stream.append(b"commit refs/heads/main\ncommitter A <a@example.org> %d +0000\ndata 1\n%d\n"
                      % (1_700_000_000 + commit, commit % 10))
        for number in range(12) if commit == 0 else chance.sample(range(12), 3):
            for _ in range(200 if commit else 0):
                files[number][chance.randrange(8000)] = b" ".join(chance.choices(words, k=9))
            text = b"\n".join(files[number]) + b"\n"
            stream.append(b"M 100644 inline file%d\ndata %d\n%s\n" % (number, len(text), text))
    environment = git_environment()
    subprocess.run(["git", "init", "--quiet", "--bare", "--initial-branch=main", at], check=True, env=environment)
    subprocess.run(["git", "-C", at, "fast-import", "--quiet"], input=b"".join(stream), check=True, env=environment)
    return at


def git(way):
    """Clones, packs anew and checks; gives the sums of the pack and of the files."""
    origin = big_repository(product.BUILD / "programs" / "repository.git")
    clone = way.folder / "clone"
    shutil.rmtree(clone, ignore_errors=True)
    environment = git_environment()
    way.run(["git", "clone", "--quiet", "--no-local", origin, clone], 600, env=environment)
    # One thread: with two the pack depends on who is first.
    way.run(["git", "-C", clone, "-c", "pack.threads=1", "gc", "--aggressive", "--quiet", "--prune=now"], 1800,
            env=environment)
    way.run(["git", "-C", clone, "fsck", "--full", "--strict"], 600, env=environment)
    packs = sorted(path.name for path in (clone / ".git" / "objects" / "pack").glob("*.pack"))
    listed = way.run(["git", "-C", clone, "ls-tree", "-r", "HEAD"], 60, env=environment)
    files = {path.name: digest_of(path) for path in clone.glob("file*")}
    return packs, [digest_of(clone / ".git" / "objects" / "pack" / name) for name in packs], listed, files


def c_file(functions):
    """C that takes the compiler some seconds and 200 MB."""
    chance = random.Random(5)
    lines = ["#include <stdint.h>", "#include <string.h>"]
    for number in range(functions):
        lines.append(f"uint64_t f{number}(uint64_t a, uint64_t b, uint64_t *t) {{")
        lines.append("    uint64_t x = a, y = b;")
        for _ in range(30):
            op, k = chance.choice("+-*^|&"), chance.randrange(1, 1 << 30)
            lines.append(f"    if (x % {k % 97 + 2} == {k % 7}) y {op}= x {chance.choice('+^*')} {k}u; "
                         f"else x = (x >> {k % 31 + 1}) {op} t[(y + {k}) % 64];")
        call = f"f{chance.randrange(number)}(y, x, t)" if number else "y"
        lines.append(f"    return x ^ {call};\n}}")
    return "\n".join(lines) + "\n"


def gcc(way, functions=FUNCTIONS):
    """Compiles; gives the sum of the object file."""
    source, made = way.folder / "large.c", way.folder / "large.o"
    source.write_text(c_file(functions))
    way.run(["gcc", "-O2", "-c", "-o", made.name, source.name], 1800, cwd=way.folder)
    return digest_of(made)


def cargo(way):
    """Builds a crate of this workspace; gives the sums of the libraries that came of it."""
    # The same path each time: it is part of what is made.
    target = product.BUILD / "programs" / "target"
    shutil.rmtree(target, ignore_errors=True)
    way.run(["cargo", "build", "--quiet", "--offline", "--release", "-j", "1", "-p", "tiermgr-core"], 1800,
            cwd=product.ROOT, env=product.clean_environment(CARGO_TARGET_DIR=str(target)))
    made = {path.name: digest_of(path) for path in (target / "release" / "deps").glob("*.rlib")}
    shutil.rmtree(target)
    return made


def cases():
    return [
        Case("git", "clone, gc --aggressive, fsck of 60 commits over 12 files of 0.5 MB", git),
        Case("gcc", f"-O2 of a C file of {FUNCTIONS} functions", gcc, moves_with_mmap=True),
        Case("cargo", "build --release of tiermgr-core", cargo),
    ]
