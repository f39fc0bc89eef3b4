/* A program that closes every descriptor it does not know goes on allocating. */
#include "check.h"
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

static void use(const char *after) {
    size_t bytes = 48 << 20;
    /* More than is kept of freed memory: the daemon is told. */
    for (uint64_t round = 0; round < 4; round++) {
        unsigned char *a = need(bytes), *b = need(bytes);
        fill(a, bytes, round);
        fill(b, bytes, round + 1);
        verify(a, bytes, round, after);
        verify(b, bytes, round + 1, after);
        free(a);
        free(b);
    }
    /* More than the first arena has: the daemon is asked for another. */
    unsigned char *large = need((size_t)960 << 20), *more = need((size_t)100 << 20);
    large[0] = 1;
    more[0] = 1;
    free(large);
    free(more);
}

/* A system call that no library sees. */
static long by_instruction(long number, long a, long b) {
#ifdef __x86_64__
    long result;
    asm volatile("syscall" : "=a"(result) : "0"(number), "D"(a), "S"(b) : "rcx", "r11", "memory");
    return result;
#else
    register long x8 asm("x8") = number, x0 asm("x0") = a, x1 asm("x1") = b, x2 asm("x2") = 0;
    asm volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2) : "memory");
    return x0;
#endif
}

#ifdef SYS_dup2
#define DUP2 SYS_dup2
#else
#define DUP2 SYS_dup3
#endif

static unsigned open_between(int from, int end) {
    unsigned count = 0;
    for (int fd = from; fd < end; fd++)
        count += fcntl(fd, F_GETFD) >= 0;
    return count;
}

static unsigned userfaultfds(void) {
    unsigned count = 0;
    for (int fd = 3; fd < 1100; fd++) {
        char path[32], target[32] = "";
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        count += readlink(path, target, sizeof target - 1) > 0 && strcmp(target, "anon_inode:[userfaultfd]") == 0;
    }
    return count;
}

static void in_a_child(const char *how, bool as_many) {
    unsigned before = open_between(3, 1100);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        /* The library has left what is its parent's, and made its own. */
        unsigned now = open_between(3, 1100);
        if (as_many && now != before)
            FAIL("%s: %u descriptors, and %u in the parent", how, now, before);
        use(how);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    if (status != 0)
        FAIL("%s: status %#x", how, status);
}

/* What a library cannot prevent it has to notice: the numbers become somebody else's, who gets no byte that is
 * not for them. */
static void behind_its_back(void) {
    for (int fd = 3; fd < 1100; fd++)
        by_instruction(SYS_close, fd, 0);
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0);
    for (int fd = 400; fd < 600; fd++)
        CHECK(by_instruction(DUP2, pair[0], fd) == fd);
    use("after all was closed behind its back");
    /* The daemon that was found again has given what keeps parked pages from reading as zeros without it. */
    if (getenv("EXPECT_MANAGED") && userfaultfds() == 0)
        FAIL("the userfaultfd of managed memory was not got back");
    /* The parent's are gone. */
    in_a_child("in a child after all was closed behind its back", false);
    char byte;
    if (recv(pair[1], &byte, 1, MSG_DONTWAIT) != -1 || errno != EAGAIN)
        FAIL("a message for the daemon came to somebody else");
    for (int fd = 400; fd < 600; fd++)
        if (fcntl(fd, F_GETFD) < 0)
            FAIL("descriptor %d was closed, which is somebody else's", fd);
    for (int fd = 400; fd < 600; fd++)
        close(fd);
}

int main(void) {
    use("at first");
    in_a_child("in a child at first", true);
    for (int fd = 3; fd < 1100; fd++)
        syscall(SYS_close, fd);
    CHECK(syscall(SYS_close_range, 3, ~0u, 0) == 0);
    use("after close by syscall()");
    int copy = fcntl(0, F_DUPFD, 500);
    CHECK(copy >= 500 && close(copy) == 0);
    for (int fd = 3; fd < 1100; fd++)
        close(fd);
    use("after close of all");
    CHECK(close_range(3, ~0u, 0) == 0);
    use("after close_range");
    closefrom(3);
    use("after closefrom");

    /* dup2 onto a number of ours is refused, and onto others it works. */
    unsigned refused = 0;
    for (int fd = 400; fd < 600; fd++) {
        if (dup2(0, fd) == fd)
            CHECK(close(fd) == 0);
        else if (errno == EBUSY && syscall(SYS_dup3, 0, fd, O_CLOEXEC) == -1 && errno == EBUSY)
            refused++;
        else
            FAIL("dup2 onto %d: %s", fd, strerror(errno));
    }
    if (getenv("EXPECT_MANAGED") && refused == 0)
        FAIL("no descriptor of the library was found");
    use("after dup2 onto all");

    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK(close_range(3, ~0u, 0) == 0);
        use("in a child after close_range");
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    if (status != 0)
        FAIL("the child ended with status %#x", status);

    /* In the child of a vfork everything may be closed; the parent keeps its own. */
    child = vfork();
    if (child == 0) {
        close_range(3, ~0u, 0);
        execl("/bin/true", "true", (char *)NULL);
        _exit(126);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    use("after a vfork whose child closed all");
    behind_its_back();
    printf("ok descriptors: %u are the library's\n", refused);
    return 0;
}
