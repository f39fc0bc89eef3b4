/* System calls by which a program changes its memory, on a part of a malloc'ed block, or with MAPPED of a
 * mapping of its own. STATE says where its
 * bytes are when the call comes: "native" (nothing is armed yet), "resident" or "parked". Without the preload
 * library the same table states what Linux does. ONLY names some of its rows, as "|munmap|mremap|". Every byte
 * is looked at after each call, and after the block was freed its next owner must find memory as malloc gives
 * it. */
#include "check.h"
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#ifndef MADV_DONTNEED_LOCKED
#define MADV_DONTNEED_LOCKED 24
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#define GUARD_INSTALL 102
#define GUARD_REMOVE 103
#define PAGE ((size_t)4096)
/* The part begins and ends inside an extent of 64 KiB, and the block is larger than a chunk. */
#define BLOCK ((size_t)4 << 20)
#define FROM (5 * PAGE)
#define PART ((size_t)2 << 20 | 3 * PAGE)
#define SEED 1

static const char *state, *current;
static unsigned char *block, *part;

/* A word in each page of a block of the size of the working set: the cheapest that makes others leave. */
static void squeeze(void) {
    static uint64_t *words, round;
    size_t bytes = working_set();
    if (!words)
        words = need(bytes);
    round++;
    for (size_t i = 0; i < bytes / 8; i += PAGE / 8) {
        if (words[i] != (round == 1 ? words[i] : pattern(round - 1, i)))
            FAIL("%s: word %zu of the block that makes pressure is wrong", current, i);
        words[i] = pattern(round, i);
    }
}

static bool readable(const void *at) { return can_read(at); }

static void to_state(void) {
    if (strcmp(state, "native") == 0)
        return;
    squeeze();
    if (strcmp(state, "resident") == 0) {
        verify(block, BLOCK, SEED, "before the call");
        fill(block, BLOCK, SEED);
        return;
    }
    /* Memory of which the row before had made moves fail rests for seconds before it is tried again. */
    size_t wanted = BLOCK / PAGE * 9 / 10, away = 0;
    uint64_t until = now_ns() + 20000000000u;
    do {
        squeeze();
        away = absent_pages(block, BLOCK);
    } while (away < wanted && now_ns() < until);
    if (getenv("EXPECT_PARKED") && away < wanted)
        FAIL("%s: only %zu of %zu pages are away", current, away, BLOCK / PAGE);
}

static bool is_mapped;

static unsigned char *get_block(void) {
    unsigned char *got;
    if (is_mapped) {
        got = mmap(NULL, BLOCK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(got != MAP_FAILED);
        verify_zero(got, BLOCK, current);
    } else {
        got = aligned_alloc(PAGE, BLOCK);
    }
    CHECK(got && (uintptr_t)got % PAGE == 0);
    return got;
}

static void put_block(unsigned char *got) {
    if (is_mapped)
        CHECK(munmap(got, BLOCK) == 0);
    else
        free(got);
}

static void begin(void) {
    block = get_block();
    part = block + FROM;
    fill(block, BLOCK, SEED);
    to_state();
}

/* What was not named has its bytes; and has them also when it has been away meanwhile. */
static void around(void) {
    verify_part(block, 0, FROM, SEED, current);
    verify_part(block, FROM + PART, BLOCK - FROM - PART, SEED, current);
}

static void unchanged(void) { verify(block, BLOCK, SEED, current); }

static void pressure(void) {
    if (strcmp(state, "native") != 0)
        squeeze();
}

static void zeros(const void *at, size_t bytes) { verify_zero(at, bytes, current); }

/* New bytes live there like all others. */
static void can_be_used(void *at, size_t bytes) {
    fill(at, bytes, 7);
    pressure();
    verify(at, bytes, 7, current);
}

static size_t locked_bytes(void) {
    char line[256];
    size_t kilobytes = SIZE_MAX;
    FILE *file = fopen("/proc/self/status", "r");
    CHECK(file);
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "VmLck: %zu kB", &kilobytes) == 1)
            break;
    fclose(file);
    CHECK(kilobytes != SIZE_MAX);
    return kilobytes << 10;
}

/* The block goes, and whoever gets its addresses finds nothing of what was done to it. */
static void end(void) {
    put_block(block);
    unsigned char *owners[4];
    for (int i = 0; i < 4; i++) {
        owners[i] = get_block();
        fill(owners[i], BLOCK, 100 + i);
    }
    pressure();
    for (int i = 0; i < 4; i++)
        verify(owners[i], BLOCK, 100 + i, current);
    for (int i = 0; i < 4; i++)
        put_block(owners[i]);
    unsigned char *zeroed = calloc(1, BLOCK);
    CHECK(zeroed);
    verify_zero(zeroed, BLOCK, current);
    free(zeroed);
}

static void dontneed(void) {
    CHECK(madvise(part, PART, MADV_DONTNEED) == 0);
    zeros(part, PART);
    around();
    CHECK(madvise(part, PART, MADV_DONTNEED) == 0);
    pressure();
    zeros(part, PART);
    can_be_used(part, PART);
    CHECK(madvise(part, PART - 100, MADV_DONTNEED) == 0);
    zeros(part, PART);
    around();
    CHECK(madvise(part + 1, PAGE, MADV_DONTNEED) == -1 && errno == EINVAL);
    CHECK(madvise(part, 0, MADV_DONTNEED) == 0);
    CHECK(posix_madvise(part, PART, POSIX_MADV_DONTNEED) == 0);
    CHECK(posix_madvise(part + 1, PART, POSIX_MADV_NORMAL) == EINVAL);
}

static void expect_child(pid_t child) {
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    if (status != 0)
        FAIL("%s: the child ended with status %x", current, (unsigned)status);
}

/* Each side of a fork discards its own. */
static void dontneed_in_a_child(void) {
    pid_t child = fork();
    if (child == 0) {
        CHECK(madvise(part, PART, MADV_DONTNEED) == 0);
        zeros(part, PART);
        can_be_used(part, PART);
        around();
        _exit(0);
    }
    expect_child(child);
    unchanged();
    int ends[2];
    char byte;
    CHECK(pipe(ends) == 0);
    child = fork();
    if (child == 0) {
        CHECK(read(ends[0], &byte, 1) == 1);
        unchanged();
        _exit(0);
    }
    CHECK(madvise(part, PART, MADV_DONTNEED) == 0);
    zeros(part, PART);
    CHECK(write(ends[1], "", 1) == 1 && close(ends[0]) == 0 && close(ends[1]) == 0);
    expect_child(child);
    zeros(part, PART);
    around();
}

static void dontneed_locked(void) {
    if (madvise(part, PART, MADV_DONTNEED_LOCKED) == 0)
        zeros(part, PART);
    else
        CHECK(errno == EINVAL);
    around();
}

static void dontneed_of_locked(void) {
    if (mlock(part + PAGE, PAGE) != 0) {
        CHECK(errno == ENOMEM || errno == EPERM || errno == EAGAIN);
        return;
    }
    CHECK(madvise(part + PAGE, PAGE, MADV_DONTNEED) == -1 && errno == EINVAL);
    unchanged();
    CHECK(munlock(part + PAGE, PAGE) == 0);
    CHECK(madvise(part + PAGE, PAGE, MADV_DONTNEED) == 0);
    zeros(part + PAGE, PAGE);
    around();
}

static void lazily_freed(void) {
    CHECK(madvise(part, PART, MADV_FREE) == 0);
    around();
    pressure();
    for (size_t page = 0; page < PART / PAGE; page++) {
        const uint64_t *words = (const uint64_t *)(part + page * PAGE);
        size_t first = (FROM + page * PAGE) / 8;
        for (size_t i = 0; i < PAGE / 8; i++)
            if (words[i] != (words[0] ? pattern(SEED, first + i) : 0))
                FAIL("after MADV_FREE page %zu has neither its bytes nor zeros", page);
    }
    CHECK(madvise(part, PART, MADV_FREE) == 0);
    can_be_used(part, PART);
    around();
}

static void removed(void) {
    CHECK(madvise(part, PART, MADV_REMOVE) == -1 && errno == EINVAL);
    unchanged();
    CHECK(madvise(part, PART, 9999) == -1 && errno == EINVAL);
    unchanged();
}

static void advised(void) {
    static const int changes_nothing[] = {
        MADV_NORMAL,     MADV_RANDOM,    MADV_SEQUENTIAL, MADV_WILLNEED,      MADV_HUGEPAGE,
        MADV_NOHUGEPAGE, MADV_COLD,      MADV_PAGEOUT,    MADV_POPULATE_READ, MADV_POPULATE_WRITE,
        MADV_DONTDUMP,   MADV_DODUMP,    MADV_MERGEABLE,  MADV_UNMERGEABLE,   MADV_COLLAPSE,
    };
    for (size_t i = 0; i < sizeof changes_nothing / sizeof *changes_nothing; i++) {
        int advice = changes_nothing[i];
        if (madvise(part, PART, advice) != 0 && errno != EINVAL &&
            !(advice == MADV_COLLAPSE && (errno == EAGAIN || errno == ENOMEM || errno == EBUSY)))
            FAIL("advice %d: %s", advice, strerror(errno));
        if (i % 4 == 3)
            unchanged();
    }
    pressure();
    unchanged();
    CHECK(posix_madvise(part, PART, POSIX_MADV_WILLNEED) == 0);
    CHECK(posix_madvise(part, PART, POSIX_MADV_RANDOM) == 0);
    unchanged();
}

static void guarded(void) {
    if (madvise(part, PART, GUARD_INSTALL) != 0) {
        /* Before Linux 6.13. */
        CHECK(errno == EINVAL);
        return;
    }
    CHECK(!readable(part) && !readable(part + PART - PAGE) && !can_write(part));
    around();
    CHECK(mprotect(part, PART, PROT_READ) == 0 && !readable(part));
    CHECK(mprotect(part, PART, PROT_READ | PROT_WRITE) == 0 && !readable(part));
    pressure();
    CHECK(madvise(part, PART, GUARD_REMOVE) == 0);
    zeros(part, PART);
    can_be_used(part, PART);
    around();
    /* Freed with a guard in it. */
    CHECK(madvise(part, PAGE, GUARD_INSTALL) == 0);
}

static void wiped_in_children(void) {
    CHECK(madvise(part, PART, MADV_WIPEONFORK) == 0);
    unchanged();
    pressure();
    pid_t child = fork();
    if (child == 0) {
        zeros(part, PART);
        around();
        fill(part, PART, 8);
        pressure();
        verify(part, PART, 8, current);
        pid_t grandchild = fork();
        if (grandchild == 0) {
            zeros(part, PART);
            _exit(0);
        }
        expect_child(grandchild);
        _exit(0);
    }
    expect_child(child);
    unchanged();
    CHECK(madvise(part, PART, MADV_KEEPONFORK) == 0);
    pressure();
    child = fork();
    if (child == 0) {
        unchanged();
        _exit(0);
    }
    expect_child(child);
    CHECK(madvise(part, PART, MADV_WIPEONFORK) == 0);
}

static void kept_from_children(void) {
    CHECK(madvise(part, PART, MADV_DONTFORK) == 0);
    unchanged();
    pressure();
    pid_t child = fork();
    if (child == 0) {
        CHECK(!readable(part) && !readable(part + PART - PAGE));
        around();
        /* Its own memory may come to lie there. */
        void *own = mmap(part, PART, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(own != MAP_FAILED);
        can_be_used(own, PART);
        CHECK(madvise(own, PART, MADV_DONTNEED) == 0);
        zeros(own, PART);
        CHECK(munmap(own, PART) == 0);
        end();
        _exit(0);
    }
    expect_child(child);
    unchanged();
    CHECK(madvise(part, PART, MADV_DOFORK) == 0);
    child = fork();
    if (child == 0) {
        unchanged();
        _exit(0);
    }
    expect_child(child);
    CHECK(madvise(part, PART, MADV_DONTFORK) == 0);
}

static void *map_fixed(void *at, size_t bytes, int access, int flags, int fd, off_t offset) {
    return mmap(at, bytes, access, flags | MAP_FIXED, fd, offset);
}

static void unmapped(void) {
    CHECK(munmap(part, PART) == 0);
    CHECK(!readable(part) && !readable(part + PART / 2) && !readable(part + PART - PAGE));
    around();
    CHECK(munmap(part, PART) == 0);
    CHECK(madvise(part, PART, MADV_DONTNEED) == -1 && errno == ENOMEM);
    CHECK(madvise(block, BLOCK, MADV_WILLNEED) == -1 && errno == ENOMEM);
    CHECK(mprotect(part, PART, PROT_READ) == -1 && errno == ENOMEM);
    CHECK(mlock(part, PAGE) == -1 && errno == ENOMEM);
    CHECK(mremap(part, PART, PAGE, 0) == MAP_FAILED && errno == EFAULT);
    pressure();
    around();
    /* Taken again, in halves. */
    int anonymous = MAP_PRIVATE | MAP_ANONYMOUS;
    CHECK(mmap(part, PAGE, PROT_READ | PROT_WRITE, anonymous | MAP_FIXED_NOREPLACE, -1, 0) == part);
    CHECK(mmap(part, PART, PROT_READ, anonymous | MAP_FIXED_NOREPLACE, -1, 0) == MAP_FAILED);
    CHECK(errno == EEXIST);
    CHECK(map_fixed(part, PART, PROT_READ | PROT_WRITE, anonymous, -1, 0) == part);
    zeros(part, PART);
    can_be_used(part, PART);
    around();
    CHECK(munmap(part, PAGE) == 0);
}

static void mapped_anew(void) {
    int anonymous = MAP_PRIVATE | MAP_ANONYMOUS;
    CHECK(map_fixed(part, PART, PROT_READ | PROT_WRITE, anonymous, -1, 0) == part);
    zeros(part, PART);
    can_be_used(part, PART);
    CHECK(map_fixed(part, PART, PROT_NONE, anonymous | MAP_NORESERVE, -1, 0) == part);
    CHECK(!readable(part));
    CHECK(mprotect(part, PART, PROT_READ | PROT_WRITE) == 0);
    zeros(part, PART);
    CHECK(map_fixed(part, PART, PROT_READ, anonymous | MAP_POPULATE, -1, 0) == part);
    zeros(part, PART);
    CHECK(!can_write(part));
    around();
    pressure();
    around();
}

static void replaced(int kind) {
    int fd = memfd_create("vm_calls", 0);
    CHECK(fd >= 0 && ftruncate(fd, PART) == 0);
    unsigned char *view = mmap(NULL, PART, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(view != MAP_FAILED);
    fill(view, PART, 5);
    CHECK(map_fixed(part, PART, PROT_READ | PROT_WRITE, kind, -1, 0) == MAP_FAILED);
    CHECK(errno == EBADF);
    CHECK(map_fixed(part, PART, PROT_READ | PROT_WRITE, kind, fd, 0) == part);
    verify(part, PART, 5, current);
    around();
    fill(part, PART, 6);
    pressure();
    pressure();
    verify(part, PART, 6, current);
    verify(view, PART, kind == MAP_SHARED ? 6 : 5, current);
    around();
    /* A range that is managed in part. */
    CHECK(madvise(block, BLOCK, MADV_DONTNEED) == 0);
    verify(part, PART, kind == MAP_SHARED ? 6 : 5, current);
    zeros(block, FROM);
    zeros(part + PART, BLOCK - FROM - PART);
    fill(block, FROM, 9);
    pressure();
    verify(block, FROM, 9, current);
    CHECK(madvise(part, PAGE, MADV_COLD) == 0 || errno == EINVAL);
    /* Part of it moves on. */
    unsigned char *moved = mremap(part, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, view);
    CHECK(moved == view && !readable(part));
    verify(moved, PAGE, kind == MAP_SHARED ? 6 : 5, current);
    CHECK(munmap(part + PAGE, PAGE) == 0 && !readable(part + PAGE));
    /* Whoever gets the addresses next does not write into the file. */
    static uint64_t before[PART / 8], after[PART / 8];
    CHECK(pread(fd, before, PART, 0) == (ssize_t)PART);
    put_block(block);
    block = get_block();
    fill(block, BLOCK, 50);
    CHECK(pread(fd, after, PART, 0) == (ssize_t)PART && memcmp(before, after, PART) == 0);
    CHECK(munmap(view, PART) == 0 && close(fd) == 0);
}

static void replaced_by_shared(void) { replaced(MAP_SHARED); }
static void replaced_by_private(void) { replaced(MAP_PRIVATE); }

static void moved(void) {
    /* It has a neighbour behind it: there is no room to grow. */
    CHECK(mremap(part, PART, 2 * PART, 0) == MAP_FAILED && errno == ENOMEM);
    CHECK(mremap(part + 1, PART, PART, 0) == MAP_FAILED && errno == EINVAL);
    CHECK(mremap(part, PART, 0, MREMAP_MAYMOVE) == MAP_FAILED && errno == EINVAL);
    CHECK(mremap(part, PART, PART, MREMAP_FIXED, part) == MAP_FAILED && errno == EINVAL);
    CHECK(mremap(part, PART, PART, MREMAP_MAYMOVE | MREMAP_FIXED, part + PAGE) == MAP_FAILED);
    CHECK(errno == EINVAL);
    CHECK(mremap(part, PART, PART, 64) == MAP_FAILED && errno == EINVAL);
    CHECK(mremap(part, PART, PART, MREMAP_MAYMOVE) == part);
    unchanged();
    unsigned char *to = mremap(part, PART, 2 * PART, MREMAP_MAYMOVE);
    CHECK(to != MAP_FAILED && to != part);
    for (size_t i = 0; i < PART / 8; i++)
        if (((uint64_t *)to)[i] != pattern(SEED, FROM / 8 + i))
            FAIL("%s: word %zu is wrong after it was moved", current, i);
    zeros(to + PART, PART);
    CHECK(!readable(part) && !readable(part + PART - PAGE));
    around();
    pressure();
    around();
    CHECK(munmap(to, 2 * PART) == 0);
}

/* What a child is not to see it does not see elsewhere. An mprotect that makes no sense changes nothing. */
static void moved_and_wiped(void) {
    CHECK(mprotect(part, PART, 1 << 20) == -1 && errno == EINVAL);
    CHECK(madvise(part, PART, MADV_WIPEONFORK) == 0);
    unsigned char *to = mremap(part, PART, 2 * PART, MREMAP_MAYMOVE);
    CHECK(to != MAP_FAILED && to != part);
    pressure();
    pid_t child = fork();
    if (child == 0) {
        zeros(to, 2 * PART);
        around();
        _exit(0);
    }
    expect_child(child);
    for (size_t i = 0; i < PART / 8; i++)
        if (((uint64_t *)to)[i] != pattern(SEED, FROM / 8 + i))
            FAIL("%s: word %zu is wrong after it was moved", current, i);
    CHECK(munmap(to, 2 * PART) == 0);
    around();
}

static void moved_to_a_place(void) {
    unsigned char *place = mmap(NULL, PART, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(place != MAP_FAILED);
    /* What is away, and a lock and a protection that go along. */
    CHECK(mprotect(part, PART, PROT_READ) == 0);
    CHECK(mremap(part, PART, PART, MREMAP_MAYMOVE | MREMAP_FIXED, place) == place);
    for (size_t i = 0; i < PART / 8; i++)
        if (((uint64_t *)place)[i] != pattern(SEED, FROM / 8 + i))
            FAIL("%s: word %zu is wrong after it was moved", current, i);
    CHECK(!can_write(place) && !readable(part));
    around();
    /* And back, over a part that is managed still: its first page is the second of ours. */
    CHECK(mprotect(place, PART, PROT_READ | PROT_WRITE) == 0);
    fill(place, PART, 3);
    CHECK(mremap(place, PART, PART, MREMAP_MAYMOVE | MREMAP_FIXED, part + PAGE) == part + PAGE);
    verify(part + PAGE, PART, 3, current);
    pressure();
    verify(part + PAGE, PART, 3, current);
    verify_part(block, 0, FROM, SEED, current);
    verify_part(block, FROM + PART + PAGE, BLOCK - FROM - PART - PAGE, SEED, current);
    CHECK(!readable(part));
}

static void moved_and_kept(void) {
    unsigned char *to = mremap(part, PART, PART, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, NULL);
    CHECK(to != MAP_FAILED);
    for (size_t i = 0; i < PART / 8; i++)
        if (((uint64_t *)to)[i] != pattern(SEED, FROM / 8 + i))
            FAIL("%s: word %zu is wrong after it was moved", current, i);
    zeros(part, PART);
    can_be_used(part, PART);
    around();
    CHECK(munmap(to, PART) == 0);
}

static void shrunk(void) {
    CHECK(mremap(part, PART, PAGE, 0) == part);
    verify_part(block, 0, FROM + PAGE, SEED, current);
    CHECK(!readable(part + PAGE) && !readable(part + PART - PAGE));
    around();
    pressure();
    verify_part(block, 0, FROM + PAGE, SEED, current);
    around();
}

static void protected(void) {
    CHECK(mprotect(part, PART, PROT_READ) == 0);
    unchanged();
    CHECK(!can_write(part) && !can_write(part + PART - PAGE) && can_write(part + PART));
    CHECK(mprotect(part + PAGE, PAGE, PROT_NONE) == 0 && !readable(part + PAGE));
    CHECK(mremap(part, PART, 2 * PART, MREMAP_MAYMOVE) == MAP_FAILED && errno == EFAULT);
    pressure();
    CHECK(mprotect(part + PAGE, PAGE, PROT_READ) == 0);
    unchanged();
    CHECK(mprotect(part, PART, PROT_READ | PROT_WRITE) == 0);
    unchanged();
    CHECK(pkey_mprotect(part, PART, PROT_NONE, -1) == 0 && !readable(part));
    CHECK(pkey_mprotect(part, PART, PROT_READ | PROT_EXEC, -1) == 0);
    unchanged();
    int key = pkey_alloc(0, 0);
    if (key > 0)
        CHECK(pkey_mprotect(part, PART, PROT_READ, key) == 0);
    unchanged();
}

static void locked(void) {
    size_t before = locked_bytes();
    if (mlock(part + 7, PAGE) != 0) {
        SKIPPED("locks: %s", strerror(errno));
        return;
    }
    CHECK(locked_bytes() == before + 2 * PAGE);
    CHECK(mlock2(part + 4 * PAGE, PAGE, 1) == 0 && locked_bytes() == before + 3 * PAGE);
    unchanged();
    pressure();
    CHECK(munlock(part, 1) == 0 && locked_bytes() == before + 2 * PAGE);
    unchanged();
    put_block(block);
    CHECK(locked_bytes() <= before);
    block = get_block();
    fill(block, BLOCK, SEED);
    CHECK(locked_bytes() <= before);
}

/* The same calls through libc's syscall(). */
static void by_number(void) {
    CHECK(syscall(SYS_mprotect, part, PART, PROT_READ) == 0 && !can_write(part));
    CHECK(syscall(SYS_pkey_mprotect, part, PART, PROT_READ | PROT_WRITE, -1) == 0);
    unchanged();
    if (syscall(SYS_mlock, part, PAGE) == 0)
        CHECK(syscall(SYS_munlock, part, PAGE) == 0);
    if (syscall(SYS_mlock2, part, PAGE, 0) == 0)
        CHECK(syscall(SYS_munlock, part, PAGE) == 0);
    CHECK(syscall(SYS_madvise, part, PART, MADV_DONTNEED) == 0);
    zeros(part, PART);
    can_be_used(part, PART);
    unsigned char *to =
        (unsigned char *)syscall(SYS_mremap, part, PART, 2 * PART, MREMAP_MAYMOVE, NULL);
    CHECK(to != MAP_FAILED && to != part && !readable(part));
    verify(to, PART, 7, current);
    CHECK(syscall(SYS_munmap, to, 2 * PART) == 0);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    CHECK((void *)syscall(SYS_mmap, part, PART, PROT_READ | PROT_WRITE, flags, -1, 0) == part);
    zeros(part, PART);
    can_be_used(part, PART);
    CHECK(syscall(SYS_munmap, part, PART) == 0 && !readable(part));
    around();
    errno = 0;
    CHECK(syscall(SYS_madvise, part, PART, MADV_DONTNEED) == -1 && errno == ENOMEM);
    CHECK(syscall(SYS_getpid) == getpid());
    CHECK(syscall(SYS_close, -1) == -1 && errno == EBADF);
}

static volatile sig_atomic_t handled;

/* A handler that opens what was closed, as collectors of garbage do. */
static void opens(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)context;
    handled++;
    uintptr_t page = (uintptr_t)info->si_addr & ~(PAGE - 1);
    if (mprotect((void *)page, PAGE, PROT_READ | PROT_WRITE) != 0)
        _exit(3);
}

static void opened_by_a_handler(void) {
    struct sigaction action = {.sa_sigaction = opens, .sa_flags = SA_SIGINFO}, before;
    CHECK(sigaction(SIGSEGV, &action, &before) == 0);
    CHECK(mprotect(part, PART, PROT_NONE) == 0);
    handled = 0;
    unchanged();
    CHECK(handled == (int)(PART / PAGE));
    CHECK(sigaction(SIGSEGV, &before, NULL) == 0);
}

static const struct {
    const char *name;
    void (*does)(void);
} table[] = {
    {"MADV_DONTNEED", dontneed},
    {"MADV_DONTNEED in a child", dontneed_in_a_child},
    {"MADV_DONTNEED_LOCKED", dontneed_locked},
    {"MADV_DONTNEED of locked memory", dontneed_of_locked},
    {"MADV_FREE", lazily_freed},
    {"MADV_REMOVE", removed},
    {"MADV_GUARD_INSTALL", guarded},
    {"munmap", unmapped},
    {"mmap over it", mapped_anew},
    {"mremap", moved},
    {"mremap of what is wiped", moved_and_wiped},
    {"mremap to a place", moved_to_a_place},
    {"mremap that keeps", moved_and_kept},
    {"mremap that shrinks", shrunk},
    {"mprotect", protected},
    {"mprotect in a handler", opened_by_a_handler},
    {"mlock", locked},
    {"syscall", by_number},
    {"advice that changes nothing", advised},
    {"MADV_WIPEONFORK", wiped_in_children},
    {"MADV_DONTFORK", kept_from_children},
    {"a shared file over it", replaced_by_shared},
    {"a private file over it", replaced_by_private},
};

/* Names in the list are between bars. */
static bool is_listed(const char *list, const char *name) {
    char wanted[128];
    snprintf(wanted, sizeof wanted, "|%s|", name);
    return strstr(list, wanted);
}

int main(void) {
    state = getenv("STATE") ? getenv("STATE") : "native";
    const char *only = getenv("ONLY");
    is_mapped = getenv("MAPPED");
    size_t cases = 0;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        if (only && !is_listed(only, table[i].name))
            continue;
        char name[128];
        snprintf(name, sizeof name, "%s of %s memory", table[i].name, state);
        current = name;
        uint64_t began = now_ns();
        begin();
        table[i].does();
        end();
        if (getenv("TIMES"))
            fprintf(stderr, "%6" PRIu64 " ms %s\n", (now_ns() - began) / 1000000, name);
        cases++;
    }
    printf("ok vm_calls: %zu kinds of call on %s memory\n", cases, state);
    return 0;
}
