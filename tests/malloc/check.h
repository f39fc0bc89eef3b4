/* Shared by the programs of this folder. Each fills memory with a pattern that is a function of seed
 * and position, does its thing, and looks at every byte again; it ends with a line "ok ..." and status
 * 0, or with a line that names the first wrong place and status 1. What it cannot do here it says in a line
 * "skipped: ...".
 *
 * SIZE in the environment is the size of the working set in bytes (K, M, G may follow).
 */
#ifndef TIERMGR_TESTS_CHECK_H
#define TIERMGR_TESTS_CHECK_H

#define _GNU_SOURCE

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define FAIL(...)                                                                                  \
    do {                                                                                           \
        fprintf(stderr, "FAILED %s:%d: ", __FILE__, __LINE__);                                     \
        fprintf(stderr, __VA_ARGS__);                                                              \
        fputc('\n', stderr);                                                                       \
        _exit(1);                                                                                  \
    } while (0)

/* Something cannot be tested here. Where nothing may be skipped, whoever runs the program fails. */
#define SKIPPED(...)                                                                               \
    do {                                                                                           \
        printf("skipped: ");                                                                       \
        printf(__VA_ARGS__);                                                                       \
        putchar('\n');                                                                             \
    } while (0)

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition))                                                                          \
            FAIL("%s (errno %d: %s)", #condition, errno, strerror(errno));                         \
    } while (0)

static inline size_t parse_size(const char *text) {
    char *end;
    unsigned long long value = strtoull(text, &end, 10);
    switch (*end) {
    case 'K': return value << 10;
    case 'M': return value << 20;
    case 'G': return value << 30;
    case 0: return value;
    default: FAIL("'%s' is not a size", text);
    }
}

static inline size_t setting(const char *name, const char *otherwise) {
    const char *text = getenv(name);
    return parse_size(text ? text : otherwise);
}

static inline size_t working_set(void) { return setting("SIZE", "256M"); }

static inline uint64_t pattern(uint64_t seed, uint64_t index) {
    uint64_t x = (index + 1) * 0x9e3779b97f4a7c15u ^ seed * 0xbf58476d1ce4e5b9u;
    return x ^ x >> 29;
}

static inline void fill(void *memory, size_t bytes, uint64_t seed) {
    uint64_t *words = memory;
    for (size_t i = 0; i < bytes / 8; i++)
        words[i] = pattern(seed, i);
}

/* Looks at `bytes` from byte `from` on. */
static inline void verify_part(const void *memory, size_t from, size_t bytes, uint64_t seed,
                               const char *what) {
    const volatile uint64_t *words = memory;
    for (size_t i = from / 8; i < (from + bytes) / 8; i++) {
        uint64_t found = words[i];
        if (found != pattern(seed, i))
            FAIL("%s: byte %zu of %p: found %016" PRIx64 ", wanted %016" PRIx64 " (pid %d)", what,
                 i * 8, (const void *)memory, found, pattern(seed, i), (int)getpid());
    }
}

static inline void verify(const void *memory, size_t bytes, uint64_t seed, const char *what) {
    verify_part(memory, 0, bytes, seed, what);
}

static inline void verify_zero(const void *memory, size_t bytes, const char *what) {
    const volatile uint64_t *words = memory;
    for (size_t i = 0; i < bytes / 8; i++)
        if (words[i] != 0)
            FAIL("%s: byte %zu of %p: found %016" PRIx64 ", wanted 0", what, i * 8,
                 (const void *)memory, words[i]);
}

static inline void *need(size_t bytes) {
    void *memory = malloc(bytes);
    if (!memory)
        FAIL("malloc(%zu): %s", bytes, strerror(errno));
    return memory;
}

static inline uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Pages of a range that are not in memory now, as the kernel tells. */
static inline size_t absent_pages(const void *memory, size_t bytes) {
    int fd = open("/proc/self/pagemap", O_RDONLY);
    CHECK(fd >= 0);
    size_t absent = 0;
    for (size_t page = 0; page < bytes / 4096; page++) {
        uint64_t entry;
        off_t at = (off_t)(((uintptr_t)memory / 4096 + page) * 8);
        CHECK(pread(fd, &entry, 8, at) == 8);
        absent += !(entry >> 63);
    }
    close(fd);
    return absent;
}

/* Whether the kernel has a flag, such as " hg", for the mapping around an address. */
static inline bool has_flag(const void *address, const char *flag) {
    FILE *maps = fopen("/proc/self/smaps", "r");
    CHECK(maps);
    char line[512];
    bool inside = false, found = false;
    while (fgets(line, sizeof line, maps)) {
        uintptr_t start, end;
        if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " ", &start, &end) == 2)
            inside = (uintptr_t)address >= start && (uintptr_t)address < end;
        else if (inside && strncmp(line, "VmFlags:", 8) == 0)
            found = strstr(line, flag) != NULL;
    }
    fclose(maps);
    return found;
}

/* Arenas are advised to use huge pages; the heap of libc, the tables of jemalloc and what a program maps by
 * itself are not. */
static inline bool is_managed(const void *address) { return has_flag(address, " hg"); }

/* Mappings of this process. */
static inline size_t mappings(void) {
    FILE *maps = fopen("/proc/self/maps", "r");
    CHECK(maps);
    size_t lines = 0;
    for (int c = getc(maps); c != EOF; c = getc(maps))
        lines += c == '\n';
    fclose(maps);
    return lines;
}

/* Processes whose parent is this one, its helper above all. */
static inline int own_children(void) {
    DIR *all = opendir("/proc");
    CHECK(all);
    int count = 0;
    for (struct dirent *entry; (entry = readdir(all));) {
        char path[300], line[400];
        int parent;
        snprintf(path, sizeof path, "/proc/%s/stat", entry->d_name);
        int fd = entry->d_name[0] >= '1' && entry->d_name[0] <= '9' ? open(path, O_RDONLY) : -1;
        if (fd < 0)
            continue;
        ssize_t length = read(fd, line, sizeof line - 1);
        close(fd);
        line[length < 0 ? 0 : length] = 0;
        const char *name_end = strrchr(line, ')');
        count += name_end && sscanf(name_end, ") %*c %d", &parent) == 1 && parent == getpid();
    }
    closedir(all);
    return count;
}

/* A pipe of this process, with nothing in it. */
static inline const int *own_pipe(void) {
    static int ends[2] = {-1, -1};
    static pid_t owner;
    if (owner != getpid()) {
        CHECK(pipe(ends) == 0);
        owner = getpid();
    }
    return ends;
}

/* Whether the kernel can read a byte there for us. */
static inline bool can_read(const void *at) {
    const int *ends = own_pipe();
    char byte;
    bool can = write(ends[1], at, 1) == 1;
    CHECK(can || errno == EFAULT);
    if (can)
        CHECK(read(ends[0], &byte, 1) == 1);
    errno = 0;
    return can;
}

/* Whether it can write one there. What is there stays. */
static inline bool can_write(void *at) {
    const int *ends = own_pipe();
    unsigned char before = can_read(at) ? *(volatile unsigned char *)at : 0;
    char byte = 0;
    CHECK(write(ends[1], &byte, 1) == 1);
    bool can = read(ends[0], at, 1) == 1;
    if (can)
        *(volatile unsigned char *)at = before;
    else
        CHECK(errno == EFAULT && read(ends[0], &byte, 1) == 1);
    errno = 0;
    return can;
}

/* Takes CAP_* away by number, all of them. */
static inline void drop_capabilities(void) {
    struct {
        unsigned version;
        int pid;
    } header = {0x20080522, 0};
    unsigned none[6] = {0};
    CHECK(syscall(SYS_capset, &header, none) == 0);
}

/* Writes and reads a block of the size of the working set, so that whatever else is managed must
 * leave memory. Call pressure_end() when it has served. */
static void *pressure_block;

static inline void push_out(void) {
    size_t bytes = working_set();
    if (!pressure_block)
        pressure_block = need(bytes);
    fill(pressure_block, bytes, 999);
    verify(pressure_block, bytes, 999, "the block that makes pressure");
}

static inline void pressure_end(void) {
    free(pressure_block);
    pressure_block = NULL;
}

#endif
