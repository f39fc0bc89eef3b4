/* A process forks while most of its working set is parked. Child and parent change different parts
 * and look at all of theirs; a grandchild looks at what its parent had when it forked. */
#include "check.h"
#include <sys/wait.h>

#define BLOCK ((size_t)2 << 20)

static unsigned char **blocks;
static uint64_t *seeds;
static size_t count;

static void look(const char *who) {
    for (size_t i = 0; i < count; i++)
        verify(blocks[i], BLOCK, seeds[i], who);
}

static void change(size_t from, uint64_t by) {
    for (size_t i = from; i < count; i += 2) {
        seeds[i] += by;
        fill(blocks[i], BLOCK, seeds[i]);
    }
}

static void await(pid_t child, const char *who) {
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    if (status != 0)
        FAIL("the %s ended with status %#x", who, status);
}

int main(void) {
    count = working_set() / BLOCK;
    blocks = need(count * sizeof *blocks);
    seeds = need(count * sizeof *seeds);
    for (size_t i = 0; i < count; i++) {
        blocks[i] = need(BLOCK);
        seeds[i] = i;
        fill(blocks[i], BLOCK, i);
    }
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        change(0, 1000);
        look("child");
        pid_t grandchild = fork();
        CHECK(grandchild >= 0);
        if (grandchild == 0) {
            look("grandchild");
            _exit(0);
        }
        change(1, 2000);
        look("child, after its fork");
        await(grandchild, "grandchild");
        /* The heap still works here. */
        void *more = need(BLOCK);
        fill(more, BLOCK, 7);
        verify(more, BLOCK, 7, "a new block of the child");
        free(more);
        for (size_t i = 0; i < count; i++)
            free(blocks[i]);
        _exit(0);
    }
    change(1, 3000);
    look("parent");
    await(child, "child");
    look("parent, after its child");
    printf("ok fork_pressure: %zu bytes\n", count * BLOCK);
    return 0;
}
