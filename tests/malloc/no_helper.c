/* A program that forbids what a helper is started by. Its child tries again as long as it lives, and that costs
 * nothing: neither mappings nor addresses. What nobody will do is not refused as if somebody might: there, in the
 * child of a raw clone, and where the helper has been killed. */
#include "check.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define BYTES ((size_t)8 << 20)

static void forbid_helpers(void) {
    struct sock_filter steps[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[0])),
        BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, CLONE_VM, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {sizeof steps / sizeof *steps, steps};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0);
}

/* Asks for something, so that the daemon is looked for again and again. */
static void ask_for_ms(void *memory, uint64_t ms) {
    uint64_t end = now_ns() + ms * 1000000;
    while (now_ns() < end) {
        madvise(memory, 4096, MADV_DONTNEED);
        usleep(5000);
    }
}

/* As an allocator does that has no other way. */
static void refused_for_good(unsigned char *memory, const char *who) {
    int outcome, access = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    do {
        outcome = madvise(memory, BYTES, MADV_DONTNEED);
    } while (outcome != 0 && errno == EAGAIN);
    if (outcome == 0 || errno != EINVAL)
        FAIL("%s: MADV_DONTNEED: %s", who, outcome == 0 ? "done" : strerror(errno));
    void *at;
    do {
        at = mmap(memory, BYTES, access, flags, -1, 0);
    } while (at == MAP_FAILED && errno == EAGAIN);
    if (at != MAP_FAILED || errno != EINVAL)
        FAIL("%s: mmap: %s", who, at != MAP_FAILED ? "done" : strerror(errno));
    CHECK(madvise(memory, BYTES, MADV_FREE) == 0);
}

static void kill_helper(void) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/task/%d/children", (int)getpid());
    FILE *children = fopen(path, "r");
    int helper, other;
    CHECK(children && fscanf(children, "%d", &helper) == 1 && fscanf(children, "%d", &other) == EOF);
    fclose(children);
    CHECK(kill(helper, SIGKILL) == 0);
}

int main(void) {
    unsigned char *memory = need(BYTES);
    fill(memory, BYTES, 1);
    forbid_helpers();
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        ask_for_ms(memory, 100);
        size_t before = mappings();
        ask_for_ms(memory, 2500);
        size_t after = mappings();
        if (after > before + 2)
            FAIL("%zu mappings became %zu", before, after);
        refused_for_good(memory, "a child without a helper");
        verify_part(memory, 4096, BYTES - 4096, 1, "the child");
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    if (status != 0)
        FAIL("the child ended with status %#x", status);
    verify(memory, BYTES, 1, "the parent");
    child = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    CHECK(child >= 0);
    if (child == 0) {
        refused_for_good(memory, "the child of a raw clone");
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child);
    if (status != 0)
        FAIL("the child of a raw clone ended with status %#x", status);
    verify(memory, BYTES, 1, "the parent of a raw clone");
    kill_helper();
    refused_for_good(memory, "without the helper");
    verify(memory, BYTES, 1, "without the helper");
    printf("ok no_helper\n");
    return 0;
}
