/* A library that is linked to a program, and another time opened and closed by it. Its blocks are made before
 * main, or in dlopen, and freed after main, or in dlclose. */
#include "check.h"

static const size_t sizes[] = {1, 100, 5000, 70000, 300000, 3 << 20};
#define SIZES (sizeof sizes / sizeof *sizes)

static unsigned char *blocks[SIZES], *left;
/* Where the destructor says that it has run. */
unsigned *library_ended;

static void at_exit(void) {
    verify(left, 4000, 77, "a block of a handler of a library");
    free(left);
}

__attribute__((constructor)) static void begin(void) {
    for (size_t i = 0; i < SIZES; i++)
        fill(blocks[i] = need(sizes[i]), sizes[i], i);
    fill(left = need(4000), 4000, 77);
    CHECK(atexit(at_exit) == 0);
}

__attribute__((destructor)) static void end(void) {
    for (size_t i = 0; i < SIZES; i++) {
        verify(blocks[i], sizes[i] < 100 ? 0 : sizes[i], i, "a block of a library's constructor");
        blocks[i] = realloc(blocks[i], sizes[i] + 1000);
        verify(blocks[i], sizes[i] < 100 ? 0 : sizes[i], i, "the same, resized");
        free(blocks[i]);
        free(need(sizes[i]));
    }
    if (library_ended)
        ++*library_ended;
}

void *library_block(size_t bytes);
void *library_block(size_t bytes) {
    void *block = need(bytes);
    fill(block, bytes, 55);
    return block;
}

unsigned **library_counter(void);
unsigned **library_counter(void) { return &library_ended; }
