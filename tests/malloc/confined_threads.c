/* A filter is its thread's, and that of the threads which that makes: the others go on as they did. And what
 * the library itself must not do under a filter it leaves. WHAT says which case. */
#include "check.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

enum { BLOCK = 8 << 20 };

/* Does `action` for these system calls, and allows all others. */
static void forbid(const long *numbers, size_t count, unsigned action, unsigned flags) {
    struct sock_filter steps[16] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
    };
    for (size_t i = 0; i < count; i++)
        steps[1 + i] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K,
                                                    (unsigned)numbers[i],
                                                    (unsigned char)(count - i), 0);
    steps[1 + count] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    steps[2 + count] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, action);
    struct sock_fprog program = {(unsigned short)(3 + count), steps};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    if (flags)
        CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &program) == 0);
    else
        CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

#define FORBID(action, flags, ...)                                                                 \
    do {                                                                                           \
        const long numbers[] = {__VA_ARGS__};                                                      \
        forbid(numbers, sizeof numbers / sizeof *numbers, action, flags);                          \
    } while (0)

/* Whether the daemon may be asked: a discard gives zeros, or says that it does not, and gives none. */
static bool discards(void) {
    unsigned char *block = aligned_alloc(4096, BLOCK);
    CHECK(block);
    fill(block, BLOCK, 1);
    bool done = madvise(block, BLOCK, MADV_DONTNEED) == 0;
    if (done) {
        verify_zero(block, BLOCK, "discarded");
    } else {
        CHECK(errno == EINVAL);
        verify(block, BLOCK, 1, "not discarded");
    }
    free(block);
    return done;
}

static void goes_on(void) {
    CHECK(discards());
    /* More than there is arena. */
    unsigned char *much = need(600 << 20);
    fill(much, 1 << 20, 2);
    free(much);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0)
        _exit(discards() ? 0 : 1);
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

static void *without_asking(void *unused) {
    (void)unused;
    CHECK(!discards());
    return NULL;
}

static void in_thread(void *(*body)(void *)) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, body, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
}

static void *harmless(void *unused) {
    FORBID(SECCOMP_RET_ERRNO | EPERM, 0, SYS_reboot);
    CHECK(discards());
    return unused;
}

static void *deadly(void *unused) {
    FORBID(SECCOMP_RET_KILL_PROCESS, 0, SYS_sendmsg);
    in_thread(without_asking);
    return without_asking(unused);
}

/* Of this one it cannot even be asked whether there is a filter. */
static void *deaf(void *unused) {
    FORBID(SECCOMP_RET_KILL_PROCESS, 0, SYS_sendmsg, SYS_prctl, SYS_clone, SYS_clone3);
    return without_asking(unused);
}

static void *strict(void *unused) {
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT) == 0);
    syscall(SYS_exit, 0);
    return unused;
}

static void *for_all(void *unused) {
    FORBID(SECCOMP_RET_KILL_PROCESS, SECCOMP_FILTER_FLAG_TSYNC, SYS_sendmsg);
    return without_asking(unused);
}

int main(void) {
    const char *what = getenv("WHAT");
    CHECK(what);
    fill(need(1 << 20), 1 << 20, 1);
    if (strcmp(what, "harmless") == 0) {
        in_thread(harmless);
        goes_on();
    } else if (strcmp(what, "vfork") == 0) {
        pid_t child = vfork();
        if (child == 0) {
            FORBID(SECCOMP_RET_KILL_PROCESS, 0, SYS_sendmsg);
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
        goes_on();
    } else if (strcmp(what, "deadly") == 0) {
        in_thread(deadly);
        goes_on();
        in_thread(deaf);
        goes_on();
        in_thread(strict);
        goes_on();
    } else if (strcmp(what, "for-all") == 0) {
        in_thread(for_all);
        CHECK(!discards());
        in_thread(without_asking);
    } else if (strcmp(what, "no-mprotect") == 0) {
        int access = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS;
        unsigned char *before = mmap(NULL, BLOCK, access, flags, -1, 0);
        CHECK(before != MAP_FAILED);
        fill(before, BLOCK, 3);
        unsigned char *block = need(BLOCK);
        CHECK(mprotect(block + 4096 - (uintptr_t)block % 4096, 4096, PROT_READ) == 0);
        FORBID(SECCOMP_RET_KILL_PROCESS, 0, SYS_mprotect);
        CHECK(munmap(before, BLOCK) == 0);
        free(block);
        for (int i = 0; i < 3; i++) {
            unsigned char *after = mmap(NULL, BLOCK, access, flags, -1, 0);
            CHECK(after != MAP_FAILED);
            verify_zero(after, BLOCK, "a new mapping");
            fill(after, BLOCK, 4);
            verify(after, BLOCK, 4, "a new mapping");
            CHECK(munmap(after, BLOCK) == 0);
        }
        unsigned char *much = need(600 << 20);
        fill(much, 1 << 20, 5);
        free(much);
        CHECK(discards());
    } else if (strcmp(what, "no-munlock") == 0) {
        unsigned char *locked =
            mmap(NULL, BLOCK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(locked != MAP_FAILED);
        fill(locked, BLOCK, 6);
        CHECK(mlock(locked, BLOCK) == 0);
        FORBID(SECCOMP_RET_KILL_PROCESS, 0, SYS_mprotect, SYS_munlock);
        /* Whoever got it next would have it locked. */
        CHECK(munmap(locked, BLOCK) == -1 && errno == EPERM);
        verify(locked, BLOCK, 6, "what stays");
    } else {
        FAIL("WHAT=%s is unknown", what);
    }
    printf("ok confined threads: %s\n", what);
    return 0;
}
