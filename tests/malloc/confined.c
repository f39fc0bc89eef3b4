/* A program that takes rights or room from itself, as WHAT says, while much of its memory is parked: it goes
 * on, and so do the children that it forks afterwards. */
#include "check.h"
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

static unsigned char *memory;
static size_t bytes;

static void limit(int resource, rlim_t value) {
    struct rlimit limit = {value, value};
    CHECK(setrlimit(resource, &limit) == 0);
}

static size_t kib_of(const char *field) {
    char line[256];
    FILE *status = fopen("/proc/self/status", "r");
    CHECK(status);
    size_t kib = 0;
    while (fgets(line, sizeof line, status))
        if (strncmp(line, field, strlen(field)) == 0)
            kib = strtoull(line + strlen(field), NULL, 10);
    fclose(status);
    CHECK(kib > 0);
    return kib;
}

/* Ends the program for one system call. */
static void forbid(long number, unsigned action) {
    struct sock_filter steps[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)number, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, action),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof steps / sizeof *steps, steps};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    if (getenv("BY_SYSCALL"))
        CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) == 0);
    else
        CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

static const struct {
    const char *name;
    long number;
} calls[] = {
    {"userfaultfd", SYS_userfaultfd},
    {"ioctl", SYS_ioctl},
    {"madvise", SYS_madvise},
    {"mprotect", SYS_mprotect},
    {"connect", SYS_connect},
    {"socket", SYS_socket},
    {"sendmsg", SYS_sendmsg},
    {"recvmsg", SYS_recvmsg},
    {"clone3", SYS_clone3},
};

static bool confine(const char *what) {
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        size_t length = strlen(what) - strlen(calls[i].name);
        if (strlen(what) < strlen(calls[i].name) || strcmp(what + length, calls[i].name) != 0)
            continue;
        if (strncmp(what, "kill-", 5) == 0)
            forbid(calls[i].number, SECCOMP_RET_KILL_PROCESS);
        else if (strncmp(what, "refuse-", 7) == 0)
            forbid(calls[i].number, SECCOMP_RET_ERRNO | EPERM);
        else
            continue;
        return true;
    }
    if (strcmp(what, "no-waits") == 0) {
#ifdef SYS_poll
        forbid(SYS_poll, SECCOMP_RET_ERRNO | EPERM);
#endif
        forbid(SYS_ppoll, SECCOMP_RET_ERRNO | EPERM);
        forbid(SYS_clock_nanosleep, SECCOMP_RET_ERRNO | EPERM);
        return true;
    }
    if (strcmp(what, "user") == 0) {
        CHECK(setgid(65534) == 0 && setuid(65534) == 0);
    } else if (strcmp(what, "namespaces") == 0) {
        if (unshare(CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS) != 0)
            return false;
    } else if (strcmp(what, "user-namespace") == 0) {
        if (unshare(CLONE_NEWUSER) != 0)
            return false;
    } else if (strcmp(what, "chroot") == 0) {
        CHECK(chroot(getenv("FOLDER")) == 0 && chdir("/") == 0);
    } else if (strcmp(what, "capabilities") == 0) {
        drop_capabilities();
    } else if (strcmp(what, "undumpable") == 0) {
        CHECK(prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0);
    } else if (strcmp(what, "no-new-privileges") == 0) {
        CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    } else if (strcmp(what, "nofile") == 0) {
        limit(RLIMIT_NOFILE, 3);
    } else if (strcmp(what, "address-space") == 0) {
        limit(RLIMIT_AS, (kib_of("VmSize:") + (96 << 10)) << 10);
    } else if (strcmp(what, "data") == 0) {
        limit(RLIMIT_DATA, (kib_of("VmData:") + (96 << 10)) << 10);
    } else if (strcmp(what, "memlock") == 0) {
        limit(RLIMIT_MEMLOCK, 0);
    } else if (strcmp(what, "processes") == 0) {
        /* Root is not bound by it. */
        limit(RLIMIT_NPROC, 2);
        CHECK(setgid(65534) == 0 && setuid(65534) == 0);
    } else {
        FAIL("WHAT=%s is unknown", what);
    }
    return true;
}

/* Reads and writes everything, and allocates and frees. */
static void use(uint64_t before, uint64_t after, const char *who) {
    verify(memory, bytes, before, who);
    fill(memory, bytes, after);
    for (uint64_t round = 0; round < 3; round++) {
        unsigned char *block = need(24 << 20);
        fill(block, 24 << 20, round);
        verify(block, 24 << 20, round, who);
        free(block);
    }
    verify(memory, bytes, after, who);
}

int main(void) {
    const char *what = getenv("WHAT");
    CHECK(what);
    bytes = working_set();
    memory = need(bytes);
    fill(memory, bytes, 1);
    if (!confine(what)) {
        SKIPPED("%s: %s", what, strerror(errno));
        return 0;
    }
    use(1, 2, "the program");
    pid_t child = fork();
    if (child < 0 && strcmp(what, "processes") == 0) {
        /* As without the library: the limit is reached. */
        CHECK(errno == EAGAIN);
        use(2, 4, "the program that could not fork");
        printf("ok confined: %s, and no child\n", what);
        return 0;
    }
    CHECK(child >= 0);
    if (child == 0) {
        use(2, 3, "the child");
        _exit(0);
    }
    use(2, 4, "the parent");
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    if (status != 0)
        FAIL("the child ended with status %#x", status);
    verify(memory, bytes, 4, "the parent at the end");
    printf("ok confined: %s\n", what);
    return 0;
}
