/* deny CALL... -- COMMAND: runs COMMAND, for which each CALL answers EPERM, as under the seccomp profiles of
 * containers. */
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

static const struct {
    const char *name;
    unsigned number;
} calls[] = {
    {"userfaultfd", SYS_userfaultfd},
    {"io_uring_setup", SYS_io_uring_setup},
    {"pidfd_getfd", SYS_pidfd_getfd},
    {"process_vm_readv", SYS_process_vm_readv},
    {"kcmp", SYS_kcmp},
    {"seccomp", SYS_seccomp},
    {"clone3", SYS_clone3},
};

int main(int count, char **arguments) {
    struct sock_filter steps[2 + 2 * (sizeof calls / sizeof *calls)];
    unsigned short used = 0;
    steps[used++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS,
                                                 offsetof(struct seccomp_data, nr));
    int at = 1;
    for (; at < count && strcmp(arguments[at], "--") != 0; at++) {
        size_t call = 0;
        while (call < sizeof calls / sizeof *calls && strcmp(calls[call].name, arguments[at]) != 0)
            call++;
        if (call == sizeof calls / sizeof *calls || used + 3u > sizeof steps / sizeof *steps) {
            fprintf(stderr, "deny: %s is not known, or one too many\n", arguments[at]);
            return 2;
        }
        steps[used++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, calls[call].number, 0, 1);
        steps[used++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM);
    }
    steps[used++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog program = {used, steps};
    if (at + 1 >= count || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
        perror("deny");
        return 2;
    }
    execvp(arguments[at + 1], arguments + at + 1);
    perror(arguments[at + 1]);
    return 127;
}
