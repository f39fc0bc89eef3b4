"""stress-ng, which verifies what it wrote."""

from ways import Case

SECONDS = 30


def stressor(*arguments):
    def run(way):
        # A file system that takes its temporary files; its memory need not be the least.
        way.run(["stress-ng", *arguments, "--verify", "--timeout", f"{SECONDS}s", "--temp-path", way.folder,
                 "--oomable"], SECONDS * 10, cwd=way.folder)
        return "verified"

    return run


def cases(mmap):
    listed = [
        ("stress-vm", ["--vm", 2, "--vm-bytes", "256M", "--vm-method", "all"], True),
        ("stress-malloc", ["--malloc", 2, "--malloc-bytes", "256M"], False),
        ("stress-fork", ["--fork", 2], False),
    ]
    if mmap:
        listed += [("stress-mmap", ["--mmap", 2, "--mmap-bytes", "256M"], True),
                   ("stress-mremap", ["--mremap", 2, "--mremap-bytes", "128M"], True)]
    return [Case(name, f"{' '.join(map(str, words))} --verify, {SECONDS} s", stressor(*words), moves_with_mmap=moves)
            for name, words, moves in listed]
