/* Memory in which every word is known: each page has a number and a version, and nothing else decides
 * what it holds. For the programs of the system tests. */
#ifndef PAGES_H
#define PAGES_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define MIB (1UL << 20)
#define PAGE 4096UL
#define PAGE_WORDS (PAGE / sizeof(uint64_t))

struct pages {
    uint64_t *words;
    uint32_t *versions;
    uint64_t count;
};

static inline uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15U;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
    return x ^ (x >> 31);
}

/* What page `page` holds after `version` changes. */
static inline void write_page(uint64_t *words, uint64_t page, uint64_t version)
{
    uint64_t seed = mix(page * 1000003 + version);

    for (uint64_t i = 0; i < PAGE_WORDS; i++)
        words[i] = seed + i;
}

/* Ends the program with status 1 where a word is wrong. */
static inline void check_page(const uint64_t *words, uint64_t page, uint64_t version,
                              const char *who)
{
    uint64_t seed = mix(page * 1000003 + version);

    for (uint64_t i = 0; i < PAGE_WORDS; i++) {
        if (words[i] == seed + i)
            continue;
        fprintf(stderr, "%s: word %lu of page %lu (version %lu) at %p is %016lx, should be %016lx\n",
                who, (unsigned long)i, (unsigned long)page, (unsigned long)version,
                (const void *)&words[i], (unsigned long)words[i], (unsigned long)(seed + i));
        exit(1);
    }
}

/* Writes version 0 everywhere. */
static inline struct pages fill_pages(void *memory, size_t bytes)
{
    struct pages pages = {.words = memory, .count = bytes / PAGE};

    pages.versions = calloc(pages.count, sizeof(*pages.versions));
    if (pages.versions == NULL)
        exit(1);
    for (uint64_t page = 0; page < pages.count; page++)
        write_page(pages.words + page * PAGE_WORDS, page, 0);
    return pages;
}

static inline void check(const struct pages *pages, const char *who)
{
    for (uint64_t page = 0; page < pages->count; page++)
        check_page(pages->words + page * PAGE_WORDS, page, pages->versions[page], who);
}

/* Changes one page in `every`, chosen by `seed`. */
static inline void change(struct pages *pages, uint64_t seed, uint64_t every)
{
    for (uint64_t n = 0; n < pages->count / every; n++) {
        uint64_t page = mix(seed + n) % pages->count;

        check_page(pages->words + page * PAGE_WORDS, page, pages->versions[page], "before a change");
        pages->versions[page]++;
        write_page(pages->words + page * PAGE_WORDS, page, pages->versions[page]);
    }
}

#endif
