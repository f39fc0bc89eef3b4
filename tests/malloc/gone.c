/* The daemon, whose processes DAEMON names, has ended as it was told to, and the program needs more memory than
 * it has from it. That comes from libc, whatever its size: only the first request waits for a daemon that might
 * come back. If each did, this would take most of an hour. */
#include "check.h"
#include <signal.h>

#define LARGE ((size_t)32 << 20)
#define LARGE_COUNT ((size_t)400)
#define SMALL 3000
#define SMALL_COUNT ((size_t)20000)
#define FREED_COUNT ((size_t)2000)

static unsigned char *large[LARGE_COUNT], *small[SMALL_COUNT];

static unsigned char *marked(size_t bytes, size_t index) {
    unsigned char *block = need(bytes);
    block[0] = (unsigned char)index;
    block[bytes - 1] = (unsigned char)~index;
    return block;
}

static void let_go(unsigned char *block, size_t bytes, size_t index) {
    if (block[0] != (unsigned char)index || block[bytes - 1] != (unsigned char)~index)
        FAIL("block %zu of %zu bytes has changed", index, bytes);
    free(block);
}

int main(void) {
    char *list = getenv("DAEMON");
    CHECK(list);
    large[0] = marked(LARGE, 0);
    CHECK(is_managed(large[0]));
    char *keeper = strtok(list, " "), *daemon = strtok(NULL, " ");
    CHECK(keeper && daemon && kill((pid_t)atoi(keeper), SIGTERM) == 0);
    while (kill((pid_t)atoi(daemon), 0) == 0)
        usleep(10000);
    CHECK(errno == ESRCH);
    size_t managed = 1;
    for (size_t i = 1; i < LARGE_COUNT; i++) {
        large[i] = marked(LARGE, i);
        managed += is_managed(large[i]);
    }
    if (managed == LARGE_COUNT)
        FAIL("%zu blocks fit into what the daemon gave", managed);
    for (size_t i = 0; i < FREED_COUNT; i++)
        let_go(marked(LARGE, i), LARGE, i);
    for (size_t i = 0; i < SMALL_COUNT; i++)
        small[i] = marked(SMALL, i);
    CHECK(!is_managed(small[SMALL_COUNT - 1]));
    for (size_t i = 0; i < SMALL_COUNT; i++)
        let_go(small[i], SMALL, i);
    for (size_t i = 0; i < LARGE_COUNT; i++)
        let_go(large[i], LARGE, i);
    printf("ok gone: %zu of %zu large blocks were managed\n", managed, LARGE_COUNT);
    return 0;
}
