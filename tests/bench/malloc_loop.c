/* What an allocator costs when everything fits: `malloc_loop BYTES ROUNDS` allocates blocks of BYTES,
 * touches each page of them, and frees them, 16 alive at a time. Prints nanoseconds a block. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define ALIVE 16

int main(int argc, char **argv)
{
    static volatile char *blocks[ALIVE];
    size_t bytes = argc == 3 ? strtoul(argv[1], NULL, 10) : 0;
    unsigned long rounds = argc == 3 ? strtoul(argv[2], NULL, 10) : 0;
    struct timespec start, end;

    if (bytes == 0 || rounds == 0) {
        fprintf(stderr, "usage: %s BYTES ROUNDS\n", argv[0]);
        return 2;
    }
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (unsigned long round = 0; round < rounds; round++) {
        size_t slot = round % ALIVE;

        free((void *)(uintptr_t)blocks[slot]);
        blocks[slot] = malloc(bytes);
        if (blocks[slot] == NULL)
            return 1;
        for (size_t at = 0; at < bytes; at += 4096)
            blocks[slot][at] = (char)round;
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    printf("{\"ns_per_block\": %.1f}\n",
           ((double)(end.tv_sec - start.tv_sec) * 1e9 + (double)(end.tv_nsec - start.tv_nsec)) /
               (double)rounds);
    return 0;
}
