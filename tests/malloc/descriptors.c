/* A program that closes every descriptor it does not know goes on allocating. */
#include "check.h"
#include <sys/socket.h>
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

int main(void) {
    use("at first");
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
        else if (errno == EBUSY)
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
    printf("ok descriptors: %u are the library's\n", refused);
    return 0;
}
