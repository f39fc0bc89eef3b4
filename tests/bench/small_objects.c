/* What small objects cost where everything fits: `small_objects COUNT ROUNDS` makes COUNT objects of 16 to
 * 256 bytes, replaces as many of them at random in each round, and looks at all of them. Prints bytes held
 * for each byte asked for, and nanoseconds for each step. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static uint64_t chance = 88172645463325252u;

static uint64_t next(void)
{
    chance ^= chance << 13;
    chance ^= chance >> 7;
    chance ^= chance << 17;
    return chance;
}

static double now(void)
{
    struct timespec at;

    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec * 1e9 + (double)at.tv_nsec;
}

/* Anonymous memory of this process. */
static double held(void)
{
    char line[256];
    double kib = 0;
    FILE *status = fopen("/proc/self/status", "r");

    while (status && fgets(line, sizeof line, status))
        if (sscanf(line, "RssAnon: %lf kB", &kib) == 1)
            break;
    if (status)
        fclose(status);
    return kib * 1024;
}

static size_t bytes_of(uint64_t word) { return 16 + (word >> 20) % 241; }

int main(int argc, char **argv)
{
    size_t count = argc == 3 ? strtoul(argv[1], NULL, 10) : 0;
    size_t rounds = argc == 3 ? strtoul(argv[2], NULL, 10) : 0;
    double asked = 0, began, made, churned, read, sum = 0;
    uint64_t **objects = calloc(count ? count : 1, sizeof *objects);

    if (count == 0 || rounds == 0 || !objects) {
        fprintf(stderr, "usage: %s COUNT ROUNDS\n", argv[0]);
        return 2;
    }
    memset(objects, 0xff, count * sizeof *objects);
    double before = held();
    began = now();
    for (size_t i = 0; i < count; i++) {
        uint64_t word = next();

        objects[i] = malloc(bytes_of(word));
        objects[i][0] = word;
        asked += (double)bytes_of(word);
    }
    made = now() - began;
    double full = held() - before;
    began = now();
    for (size_t i = 0; i < count * rounds; i++) {
        uint64_t word = next();
        size_t any = next() % count;

        asked -= (double)bytes_of(objects[any][0]);
        free(objects[any]);
        objects[any] = malloc(bytes_of(word));
        objects[any][0] = word;
        asked += (double)bytes_of(word);
    }
    churned = now() - began;
    began = now();
    for (size_t i = 0; i < count; i++)
        sum += (double)bytes_of(objects[i][0]);
    read = now() - began;
    if (sum != asked) {
        fprintf(stderr, "the objects are not what was written\n");
        return 1;
    }
    printf("{\"ns_per_malloc\": %.1f, \"ns_per_replacement\": %.1f, \"ns_per_read\": %.1f, "
           "\"held_per_byte_full\": %.3f, \"held_per_byte_churned\": %.3f}\n",
           made / (double)count, churned / (double)(count * rounds), read / (double)count,
           full / asked, (held() - before) / asked);
    return 0;
}
