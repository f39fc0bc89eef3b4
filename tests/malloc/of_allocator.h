/* Functions that the allocator may have and libc does not; the programs of this folder are not linked with it. */
#ifndef TIERMGR_TESTS_OF_ALLOCATOR_H
#define TIERMGR_TESTS_OF_ALLOCATOR_H

#include <malloc.h>
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

#pragma weak mallctl
#pragma weak mallctlnametomib
#pragma weak mallctlbymib
#pragma weak free_sized
#pragma weak free_aligned_sized
int mallctl(const char *, void *, size_t *, void *, size_t);
int mallctlnametomib(const char *, size_t *, size_t *);
int mallctlbymib(const size_t *, size_t, void *, size_t *, void *, size_t);
void free_sized(void *, size_t);
void free_aligned_sized(void *, size_t, size_t);

#endif
