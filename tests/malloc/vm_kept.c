/* What the kernel itself knows of a program's memory, and keeps when that moves: whether it is locked, whatever
 * the program has tried, and whether it is in core dumps. With MAPPED on mappings, else on blocks. Without the
 * preload library the same checks state what Linux does. */
#include "check.h"
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define MIB ((size_t)1 << 20)
#define GUARD_INSTALL 102
#define GUARD_REMOVE 103

static size_t kib_locked(void) {
    char line[256];
    FILE *status = fopen("/proc/self/status", "r");
    CHECK(status);
    size_t kib = SIZE_MAX;
    while (fgets(line, sizeof line, status))
        if (strncmp(line, "VmLck:", 6) == 0)
            kib = strtoull(line + 6, NULL, 10);
    fclose(status);
    CHECK(kib != SIZE_MAX);
    return kib;
}

static bool is_mapped;

static unsigned char *get(size_t bytes) {
    unsigned char *got =
        is_mapped ? mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
                  : aligned_alloc(4096, bytes);
    CHECK(got && got != MAP_FAILED);
    fill(got, bytes, 1);
    return got;
}

static void grow_and_drop(unsigned char *from, size_t bytes, const char *flag, bool has) {
    unsigned char *to = mremap(from, bytes, 2 * bytes, MREMAP_MAYMOVE);
    CHECK(to != MAP_FAILED);
    verify(to, bytes, 1, "moved");
    fill(to, 2 * bytes, 2);
    CHECK(has_flag(to, flag) == has && has_flag(to + 2 * bytes - 4096, flag) == has);
    CHECK(munmap(to, 2 * bytes) == 0);
}

static void unlocked(bool by_number) {
    size_t before = kib_locked();
    unsigned char *from = get(MIB);
    CHECK(mlock(from, MIB) == 0 && kib_locked() == before + 1024);
    CHECK((by_number ? syscall(SYS_munlockall) : munlockall()) == 0 && kib_locked() == 0);
    grow_and_drop(from, MIB, " lo", false);
    CHECK(kib_locked() == 0);
}

/* What a child is not to see it does not, whatever its owner may do there; the protection stays as it was. */
static void wiped(int access) {
    unsigned char *secret = get(4 * MIB);
    push_out();
    verify(secret, 4 * MIB, 1, "read back");
    CHECK(mprotect(secret, 4 * MIB, access) == 0);
    CHECK(madvise(secret, 4 * MIB, MADV_WIPEONFORK) == 0);
    int status;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        push_out();
        CHECK(mprotect(secret, 4 * MIB, PROT_READ) == 0);
        verify_zero(secret, 4 * MIB, "wiped");
        /* Nor do its own children see what it writes there. */
        CHECK(mprotect(secret, 4 * MIB, PROT_READ | PROT_WRITE) == 0);
        fill(secret, 4 * MIB, 7);
        push_out();
        child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            verify_zero(secret, 4 * MIB, "wiped again");
            _exit(0);
        }
        CHECK(waitpid(child, &status, 0) == child && status == 0);
        verify(secret, 4 * MIB, 7, "the child's");
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(can_write(secret) == (access == (PROT_READ | PROT_WRITE)));
    CHECK(mprotect(secret, 4 * MIB, PROT_READ | PROT_WRITE) == 0);
    verify(secret, 4 * MIB, 1, "the owner's");
    CHECK(munmap(secret, 4 * MIB) == 0);
}

/* Advice for more than can be held is refused, and what a part was advised before stays: its next owner has its bytes
 * in children. More than half of the limit of the test is too much. */
static void refused_and_freed(void) {
    size_t bytes = 36 * MIB;
    unsigned char *all = get(bytes);
    CHECK(madvise(all, MIB, MADV_WIPEONFORK) == 0);
    bool is_done = madvise(all, bytes, MADV_WIPEONFORK) == 0;
    CHECK(is_done || errno == ENOMEM);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        verify_zero(all, MIB, "wiped");
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    if (is_mapped) {
        CHECK(munmap(all, bytes) == 0);
    } else {
        free(all);
    }
    all = get(bytes);
    child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        verify(all, bytes, 1, "the next owner's");
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(munmap(all, bytes) == 0);
}

static void may_lock_little(void) {
    drop_capabilities();
    struct rlimit limit = {65536, 65536};
    CHECK(setrlimit(RLIMIT_MEMLOCK, &limit) == 0);
}

int main(void) {
    is_mapped = getenv("MAPPED");
    unsigned char *secret = get(MIB);
    CHECK(madvise(secret, MIB, MADV_DONTDUMP) == 0);
    grow_and_drop(secret, MIB, " dd", true);
    unsigned char *open = get(MIB);
    CHECK(madvise(open, MIB, MADV_DONTDUMP) == 0 && madvise(open, MIB, MADV_DODUMP) == 0);
    grow_and_drop(open, MIB, " dd", false);

    wiped(PROT_READ | PROT_WRITE);
    wiped(PROT_READ);
    wiped(PROT_NONE);
    refused_and_freed();
    unlocked(false);
    unlocked(true);
    may_lock_little();
    unsigned char *refused = get(MIB);
    CHECK(mlock(refused, MIB) == -1 && errno == ENOMEM && kib_locked() == 0);
    CHECK(mlock2(refused, MIB, MLOCK_ONFAULT) == -1 && errno == ENOMEM);
    void *other = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (madvise(other, 4096, GUARD_INSTALL) != 0) {
        SKIPPED("guards: %s", strerror(errno));
    } else {
        CHECK(madvise(refused, 4096, GUARD_INSTALL) == 0);
        CHECK(madvise(refused, 4096, GUARD_REMOVE) == 0);
        fill(refused, 4096, 1);
    }
    grow_and_drop(refused, MIB, " lo", false);
    printf("ok vm_kept\n");
    return 0;
}
