/* A block grows by half again and again up to SIZE, then shrinks; its bytes stay. */
#include "check.h"

int main(void) {
    size_t limit = working_set() / 2, bytes = 64 << 10;
    unsigned moves = 0, steps = 0;
    /* Something behind the block, so that it cannot always grow where it stands. */
    void *obstacles[64] = {0};
    unsigned char *block = need(bytes);
    fill(block, bytes, 1);
    while (bytes < limit) {
        size_t larger = bytes + bytes / 2;
        if (larger > limit)
            larger = limit;
        larger &= ~(size_t)7;
        if (steps % 3 == 0 && steps / 3 < 64)
            obstacles[steps / 3] = need(256 << 10);
        unsigned char *grown = realloc(block, larger);
        CHECK(grown);
        moves += grown != block;
        block = grown;
        verify(block, bytes, 1, "after growing");
        for (size_t i = bytes / 8; i < larger / 8; i++)
            ((uint64_t *)block)[i] = pattern(1, i);
        bytes = larger;
        steps++;
    }
    verify(block, bytes, 1, "grown");
    while (bytes > 4096) {
        bytes = bytes / 3 & ~(size_t)7;
        block = realloc(block, bytes);
        CHECK(block);
        verify(block, bytes, 1, "after shrinking");
    }
    free(block);
    for (size_t i = 0; i < 64; i++)
        free(obstacles[i]);
    printf("ok realloc_growth: %u steps, %u moves, up to %zu bytes\n", steps, moves, limit);
    return 0;
}
