/* Small objects whose memory is discarded while the daemon does what the test says. It obeys lines on its
 * standard input and answers each with one of its own: "free" frees two thirds of its objects and has their
 * memory given back, "fill" makes them anew, "look" looks at every byte. */
#include <inttypes.h>
#include <malloc.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT 120000

static uint64_t *objects[COUNT];
static uint64_t seeds[COUNT];

static size_t words_of(size_t index) { return 60 + index % 7; }

static void make(size_t index, uint64_t seed) {
    objects[index] = malloc(words_of(index) * 8);
    if (!objects[index])
        abort();
    seeds[index] = seed;
    for (size_t i = 0; i < words_of(index); i++)
        objects[index][i] = (seed * 0x9e3779b97f4a7c15u ^ index) + i;
}

static void look(void) {
    for (size_t index = 0; index < COUNT; index++)
        for (size_t i = 0; i < words_of(index); i++) {
            uint64_t wanted = (seeds[index] * 0x9e3779b97f4a7c15u ^ index) + i;
            if (objects[index][i] != wanted) {
                printf("object %zu, word %zu: found %016" PRIx64 ", wanted %016" PRIx64 "\n", index, i,
                       objects[index][i], wanted);
                exit(1);
            }
        }
}

int main(void) {
    char line[64];
    uint64_t seed = 1;

    setvbuf(stdout, NULL, _IOLBF, 0);
    for (size_t i = 0; i < COUNT; i++)
        make(i, seed);
    puts("ready");
    while (fgets(line, sizeof line, stdin)) {
        int trimmed = 0;
        if (strcmp(line, "free\n") == 0) {
            for (size_t i = COUNT / 6; i < COUNT - COUNT / 6; i++)
                free(objects[i]);
            trimmed = malloc_trim(0);
        } else if (strcmp(line, "fill\n") == 0) {
            seed++;
            for (size_t i = COUNT / 6; i < COUNT - COUNT / 6; i++)
                make(i, seed);
        } else {
            look();
        }
        printf("done %d\n", trimmed);
    }
    return 0;
}
