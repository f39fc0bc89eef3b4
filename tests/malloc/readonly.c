/* Weights that are made read-only stay readable under pressure, in the process and in a child. */
#include "check.h"
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

static sigjmp_buf refused;

static void on_fault(int signal) {
    (void)signal;
    siglongjmp(refused, 1);
}

int main(void) {
    size_t bytes = working_set() / 4;
    unsigned char *weights = aligned_alloc(4096, bytes);
    CHECK(weights);
    fill(weights, bytes, 1);
    /* Parked before they are read-only... */
    push_out();
    CHECK(mprotect(weights, bytes, PROT_READ) == 0);
    verify(weights, bytes, 1, "parked, then read-only");
    /* ...and under pressure while they are. */
    push_out();
    verify(weights, bytes, 1, "read-only under pressure");

    signal(SIGSEGV, on_fault);
    if (sigsetjmp(refused, 1) == 0) {
        *(volatile unsigned char *)weights = 0;
        FAIL("a write to read-only memory went through");
    }
    signal(SIGSEGV, SIG_DFL);

    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        verify(weights, bytes, 1, "read-only in a child");
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);

    CHECK(mprotect(weights, bytes, PROT_READ | PROT_WRITE) == 0);
    fill(weights, bytes, 2);
    push_out();
    verify(weights, bytes, 2, "writable again");
    free(weights);
    pressure_end();
    printf("ok readonly: %zu bytes\n", bytes);
    return 0;
}
