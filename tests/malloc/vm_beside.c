/* What others have inside of an extent of ours (a file, shared memory) is no reason for the rest of it to be served
 * any worse. With MAPPED on mappings, else on blocks. Without the preload library the same checks state what Linux
 * does. */
#include "check.h"
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>

#define MIB ((size_t)1 << 20)
#define PAGE ((size_t)4096)
#define EXTENT ((size_t)64 << 10)
#define ACCESS (PROT_READ | PROT_WRITE)

static unsigned char *get(size_t bytes) {
    unsigned char *got = getenv("MAPPED") ? mmap(NULL, bytes, ACCESS, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
                                          : aligned_alloc(EXTENT, bytes);
    CHECK(got && got != MAP_FAILED);
    fill(got, bytes, 1);
    return got;
}

static void put(unsigned char *at, size_t pages, int file) {
    void *put_at = mmap(at, pages * PAGE, ACCESS, MAP_SHARED | MAP_FIXED, file, 0);
    if (put_at != at)
        FAIL("%zu pages of a file at %p: %s", pages, (void *)at, strerror(errno));
}

/* Of each extent one page is a file's; one behind it is read, so that it comes back write-protected, and written. */
static void written_behind(int file) {
    size_t bytes = 24 * MIB, behind = 12 * PAGE;
    unsigned char *block = get(bytes);
    push_out();
    for (size_t extent = 0; extent < bytes / EXTENT; extent++) {
        unsigned char *start = block + extent * EXTENT;
        put(start + 8 * PAGE, 1, file);
        verify_part(block, (size_t)(start - block) + behind, PAGE, 1, "behind a file");
        for (size_t at = behind; at < behind + PAGE; at += 512)
            start[at] ^= 0xff;
    }
    push_out();
    pid_t child = fork();
    CHECK(child >= 0);
    for (size_t extent = 0; extent < bytes / EXTENT; extent++) {
        unsigned char *start = block + extent * EXTENT;
        for (size_t at = behind; at < behind + PAGE; at += 512)
            start[at] ^= 0xff;
        verify_part(block, (size_t)(start - block) + 9 * PAGE, 7 * PAGE, 1, "behind a file, changed twice");
        verify_part(block, (size_t)(start - block), 8 * PAGE, 1, "before a file");
    }
    if (child == 0)
        _exit(0);
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

/* Piece by piece into the same extents. */
static void piece_by_piece(int file) {
    unsigned char *block = get(4 * MIB);
    put(block + 16 * PAGE, 11, file);
    put(block + 27 * PAGE, 30, file);
    put(block, 3, file);
    put(block + 3 * PAGE, 3, file);
    put(block + 102 * PAGE, 20, file);
    put(block + 99 * PAGE, 10, file);
    verify_part(block, 6 * PAGE, 10 * PAGE, 1, "between two files");
    verify_part(block, 57 * PAGE, 42 * PAGE, 1, "between two files");
}

/* What the kernel refuses changes nothing. */
static void refused(void) {
    unsigned char *block = get(4 * MIB);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    CHECK(mmap(block, PAGE, ACCESS, flags, -1, 1) == MAP_FAILED && errno == EINVAL);
    CHECK(mmap(NULL, 4 * MIB, ACCESS, MAP_PRIVATE | MAP_ANONYMOUS, -1, 1) == MAP_FAILED && errno == EINVAL);
    verify(block, 4 * MIB, 1, "with an odd offset");
    /* A user with rights may lock in any case. */
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        struct rlimit none = {0, 0};
        CHECK(setrlimit(RLIMIT_MEMLOCK, &none) == 0 && setuid(65534) == 0);
        CHECK(mmap(block, PAGE, ACCESS, flags | MAP_LOCKED, -1, 0) == MAP_FAILED && errno == EPERM);
        verify(block, 4 * MIB, 1, "that may not be locked");
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

int main(void) {
    int file = memfd_create("file", 0);
    CHECK(file >= 0 && ftruncate(file, MIB) == 0);
    written_behind(file);
    piece_by_piece(file);
    refused();
    printf("ok vm_beside\n");
    return 0;
}
