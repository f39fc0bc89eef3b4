/*
 * Memory of which some bytes in the store have been changed behind the daemon's back.
 *
 *   damage MIB [touch | ignore]
 *                 fills pages that say which they are, prints "filled", waits for a line; then prints
 *                 "lost N" for each page that cannot be read, and "right" where all others are.
 *
 * Pages are read by write(2) to a file: a page that is lost answers EFAULT there, and SIGBUS here. With
 * "touch" they are read here, with "ignore" as well, and SIGBUS is ignored.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, WORDS = PAGE / 8 };

static const uint64_t MARK = 0x6567617061736968; /* "hisapage" */

static uint64_t word(uint64_t page, uint64_t n)
{
    return n == 0 ? MARK : n == 1 ? page : page * 0x9e3779b97f4a7c15 + n;
}

int main(int argc, char **argv)
{
    uint64_t pages = argc > 1 ? strtoull(argv[1], NULL, 10) * (1 << 20) / PAGE : 0;
    uint64_t *memory, copy[WORDS];
    char line[16];
    int file = memfd_create("copy", 0);

    if (pages == 0 || file < 0 || (memory = malloc(pages * PAGE + PAGE)) == NULL)
        return 2;
    memory = (uint64_t *)(((uintptr_t)memory + PAGE - 1) / PAGE * PAGE);
    for (uint64_t page = 0; page < pages; page++)
        for (uint64_t n = 0; n < WORDS; n++)
            memory[page * WORDS + n] = word(page, n);
    if (argc > 2 && strcmp(argv[2], "ignore") == 0)
        signal(SIGBUS, SIG_IGN);
    puts("filled");
    fflush(stdout);
    if (fgets(line, sizeof line, stdin) == NULL)
        return 2;
    for (uint64_t page = 0; page < pages; page++) {
        ssize_t done;

        if (argc > 2)
            (void)*(volatile uint64_t *)(memory + page * WORDS);
        done = pwrite(file, memory + page * WORDS, PAGE, 0);

        if (done < 0 && errno == EFAULT) {
            printf("lost %llu\n", (unsigned long long)page);
            continue;
        }
        if (done != PAGE || pread(file, copy, PAGE, 0) != PAGE) {
            perror("copying a page");
            return 2;
        }
        for (uint64_t n = 0; n < WORDS; n++)
            if (copy[n] != word(page, n)) {
                printf("page %llu reads wrong\n", (unsigned long long)page);
                return 1;
            }
    }
    puts("right");
    return 0;
}
