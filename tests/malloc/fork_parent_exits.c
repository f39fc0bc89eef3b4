/* A parent ends right after its fork: what it had parked or in limbo must reach the child. */
#include "check.h"
#include <sys/wait.h>

int main(void) {
    size_t bytes = working_set(), rounds = setting("ROUNDS", "3");
    for (size_t round = 0; round < rounds; round++) {
        int result[2];
        CHECK(pipe(result) == 0);
        pid_t parent = fork();
        CHECK(parent >= 0);
        if (parent == 0) {
            close(result[0]);
            unsigned char *block = need(bytes);
            fill(block, bytes, round);
            pid_t child = fork();
            CHECK(child >= 0);
            if (child > 0)
                _exit(0);
            verify(block, bytes, round, "the child whose parent has ended");
            fill(block, bytes, round + 100);
            verify(block, bytes, round + 100, "the same, after writing");
            CHECK(write(result[1], "+", 1) == 1);
            _exit(0);
        }
        close(result[1]);
        int status;
        CHECK(waitpid(parent, &status, 0) == parent);
        if (status != 0)
            FAIL("the parent ended with status %#x", status);
        char byte = 0;
        if (read(result[0], &byte, 1) != 1 || byte != '+')
            FAIL("round %zu: the child ended without a result", round);
        close(result[0]);
    }
    printf("ok fork_parent_exits: %zu rounds of %zu bytes\n", rounds, bytes);
    return 0;
}
