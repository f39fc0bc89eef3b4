/* A program that forbids what a helper is started by. Its child tries again as long as it lives, and that costs
 * nothing: neither mappings nor addresses. */
#include "check.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
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
        verify_part(memory, 4096, BYTES - 4096, 1, "the child");
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    if (status != 0)
        FAIL("the child ended with status %#x", status);
    verify(memory, BYTES, 1, "the parent");
    printf("ok no_helper\n");
    return 0;
}
