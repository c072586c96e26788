/* SPDX-License-Identifier: Apache-2.0 */
/* Where NCCL's own functions are. Programs that are linked to libnccl find ours first, since we are preloaded; those
 * that load it and ask dlsym() are given ours by our dlsym(). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "state.h"

struct real real;
_Atomic int real_ready;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void *library; /* what the program asked dlsym() about, or NULL: the next in the global scope */
static void *(*next_dlsym)(void *, const char *);

#define F(name, result, parameters, arguments) {#name, offsetof(struct real, name), (void *)name},
#define DECLARE(name, result, parameters, arguments) result name parameters;
NCCL_WRAPPED(DECLARE)
static const struct wrapped { const char *name; size_t at; void *wrapper; } wrapped[] = { NCCL_WRAPPED(F) };
#undef F
#define F(name) #name,
static const char *const plain[] = { NCCL_PLAIN(F) "ncclResetDebugInitInternal" };
#undef F
#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

static void *next_symbol(void *handle, const char *name)
{
	return next_dlsym ? next_dlsym(handle, name) : NULL;
}

/* Sanitizers call dlsym() before they can bear to be called. */
#define EARLY no_sanitize("address", "undefined", "thread")

__attribute__((constructor, EARLY)) static void find_dlsym(void)
{
	static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.2.5", "GLIBC_2.17"};

	for (size_t i = 0; i < COUNT(versions) && !next_dlsym; i++)
		*(void **)&next_dlsym = dlvsym(RTLD_NEXT, "dlsym", versions[i]);
}

static const struct wrapped *find_wrapped(const char *name)
{
	for (size_t i = 0; i < COUNT(wrapped); i++)
		if (strcmp(wrapped[i].name, name) == 0)
			return &wrapped[i];
	return NULL;
}

static bool known(const char *name)
{
	for (size_t i = 0; i < COUNT(plain); i++)
		if (strcmp(plain[i], name) == 0)
			return true;
	return find_wrapped(name) != NULL;
}

/* A function that NCCL exports and our table lacks; NULL when there is none. A program that is linked to it would hand it
 * a communicator of ours. */
static const char *unknown_export(void *any)
{
	struct link_map *map = NULL;
	const ElfW(Sym) *symbols = NULL;
	const char *names = NULL;
	const uint32_t *gnu = NULL, *sysv = NULL;
	uint32_t count = 0;
	Dl_info info;

	if (!dladdr1(any, &info, (void **)&map, RTLD_DL_LINKMAP) || !map)
		return NULL;
	for (const ElfW(Dyn) *d = map->l_ld; d->d_tag != DT_NULL; d++) {
		if (d->d_tag == DT_SYMTAB)
			symbols = (const void *)d->d_un.d_ptr;
		else if (d->d_tag == DT_STRTAB)
			names = (const char *)d->d_un.d_ptr;
		else if (d->d_tag == DT_GNU_HASH)
			gnu = (const uint32_t *)d->d_un.d_ptr;
		else if (d->d_tag == DT_HASH)
			sysv = (const uint32_t *)d->d_un.d_ptr;
	}
	if (!symbols || !names)
		return NULL;
	if (sysv) {
		count = sysv[1];
	} else if (gnu) {
		const uint32_t *buckets = gnu + 4 + gnu[2] * (sizeof(ElfW(Addr)) / 4), *chain = buckets + gnu[0];

		for (uint32_t b = 0; b < gnu[0]; b++)
			if (buckets[b] > count)
				count = buckets[b];
		if (count >= gnu[1]) {
			while (!(chain[count - gnu[1]] & 1))
				count++;
			count++;
		}
	}
	for (uint32_t i = 1; i < count; i++) {
		const char *name = names + symbols[i].st_name;

		if (symbols[i].st_shndx != SHN_UNDEF && ELF64_ST_TYPE(symbols[i].st_info) == STT_FUNC &&
		    strncmp(name, "nccl", 4) == 0 && name[4] >= 'A' && name[4] <= 'Z' && !known(name))
			return name;
	}
	return NULL;
}

/* A plugin of the program may bring NCCL with it, out of the global scope, as PyTorch's Python module does: RTLD_NEXT does
 * not see it then. */
struct search { const char *begins; char *path; };

static int look(struct dl_phdr_info *info, size_t size, void *arg)
{
	struct search *s = arg;
	const char *name = strrchr(info->dlpi_name, '/');

	(void)size;
	if (strncmp(name ? name + 1 : info->dlpi_name, s->begins, strlen(s->begins)) != 0)
		return 0;
	s->path = strdup(info->dlpi_name); /* no dlopen() here: the loader's lock is held */
	return 1;
}

static void *loaded(const char *begins)
{
	struct search s = {.begins = begins};
	void *found = NULL;

	dl_iterate_phdr(look, &s);
	if (s.path)
		found = dlopen(s.path, RTLD_LAZY | RTLD_NOLOAD);
	free(s.path);
	return found;
}

void *real_symbol(const char *begins, const char *name)
{
	void *handle = loaded(begins);

	return handle ? next_symbol(handle, name) : NULL;
}

static bool called_by_nccl(void *from)
{
	Dl_info info;
	const char *name;

	if (!dladdr(from, &info) || !info.dli_fname)
		return false;
	name = strrchr(info.dli_fname, '/');
	return strncmp(name ? name + 1 : info.dli_fname, "libnccl", 7) == 0;
}

void real_find(void)
{
	const char *extra;
	int ready = 1;

	pthread_mutex_lock(&lock);
	if (!atomic_load(&real_ready)) {
		if (!library && !next_symbol(RTLD_NEXT, "ncclGetVersion"))
			library = loaded("libnccl.so");
		for (size_t i = 0; i < COUNT(wrapped); i++) {
			void *f = next_symbol(library ? library : RTLD_NEXT, wrapped[i].name);

			memcpy((char *)&real + wrapped[i].at, &f, sizeof(f));
		}
		if (!real.ncclGetVersion) {
			dprintf(2, "gpucr: NCCL was called, and no libnccl.so is loaded\n");
			abort();
		}
		extra = unknown_export((void *)real.ncclGetVersion);
		if (extra) {
			int version = 0;

			real.ncclGetVersion(&version);
			unprotected("NCCL %d has %s, which this release does not know (it knows up to %d)", version, extra,
			            NCCL_NEWEST_KNOWN);
			ready = 2;
		}
		atomic_store_explicit(&real_ready, ready, memory_order_release);
	}
	pthread_mutex_unlock(&lock);
}

static void *ours_for(void *handle, const char *name, void *theirs)
{
	const struct wrapped *w = find_wrapped(name + (name[0] == 'p'));
	Dl_info mine, info;

	if (!w || !dladdr(w->wrapper, &mine) || !dladdr(theirs, &info))
		return theirs;
	if (mine.dli_fbase == info.dli_fbase) /* found us: is there any NCCL behind? */
		return library || next_symbol(RTLD_NEXT, name) ? theirs : NULL;
	pthread_mutex_lock(&lock);
	if (!atomic_load(&real_ready) && !library && handle != RTLD_NEXT && handle != RTLD_DEFAULT)
		library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
	pthread_mutex_unlock(&lock);
	return w->wrapper;
}

__attribute__((EARLY, always_inline)) static inline bool nccls(const char *p)
{
	p += p[0] == 'p';
	return p[0] == 'n' && p[1] == 'c' && p[2] == 'c' && p[3] == 'l';
}

__attribute__((EARLY, always_inline)) static inline bool cuda_name(const char *p)
{
	return p[0] == 'c' && p[1] == 'u' && (p[2] == 'I' || p[2] == 'M' || p[2] == 'S' || p[2] == 'd');
}

/* Without a frame of its own for all names but NCCL's, so that RTLD_NEXT means the caller's next. */
__attribute__((visibility("default"), optimize("O2", "no-stack-protector"), EARLY))
void *dlsym(void *restrict handle, const char *restrict name)
{
	if (UNLIKELY(!next_dlsym))
		find_dlsym();
	if (handle != RTLD_NEXT && nccls(name)) {
		void *theirs = next_dlsym(handle, name);

		return theirs ? ours_for(handle, name, theirs) : NULL;
	}
	if (UNLIKELY(handle != RTLD_NEXT && cuda_name(name) && cuda_ours(name))) {
		void *theirs = next_dlsym(handle, name);

		return theirs && !called_by_nccl(__builtin_return_address(0)) ? cuda_ours(name) : theirs;
	}
	return next_dlsym(handle, name);
}
