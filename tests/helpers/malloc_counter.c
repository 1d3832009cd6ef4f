// Counts a process's heap allocations between count_start() and count_stop(), by size.  For
// LD_PRELOAD; must not allocate.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);

static atomic_int counting;
static atomic_long large, small;
static atomic_size_t threshold;

static void note(size_t size) {
  if (!atomic_load(&counting)) return;
  atomic_fetch_add(size >= atomic_load(&threshold) ? &large : &small, 1);
}

void count_start(size_t at_least) {
  atomic_store(&threshold, at_least);
  atomic_store(&large, 0);
  atomic_store(&small, 0);
  atomic_store(&counting, 1);
}
void count_stop(void) { atomic_store(&counting, 0); }
long count_large(void) { return atomic_load(&large); }
long count_small(void) { return atomic_load(&small); }

void *malloc(size_t size) { return note(size), __libc_malloc(size); }
void *calloc(size_t n, size_t size) { return note(n * size), __libc_calloc(n, size); }
void *realloc(void *p, size_t size) { return note(size), __libc_realloc(p, size); }
void *memalign(size_t align, size_t size) { return note(size), __libc_memalign(align, size); }
void *aligned_alloc(size_t align, size_t size) { return memalign(align, size); }
int posix_memalign(void **out, size_t align, size_t size) {
  *out = memalign(align, size);
  return *out == NULL ? ENOMEM : 0;
}
