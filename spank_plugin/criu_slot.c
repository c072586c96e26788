// SPDX-License-Identifier: Apache-2.0
#define _GNU_SOURCE
#include <elf.h>
#include <link.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "criu_plugin.h"

struct wanted {
	const char *function;
	void **slot;
};

static int find_slot(struct dl_phdr_info *info, size_t size, void *data)
{
	const ElfW(Sym) *symbols = NULL;
	const char *names = NULL;
	uintptr_t tables[2] = { 0 }, sizes[2] = { 0 };
	struct wanted *wanted = data;
	(void)size;

	for (int i = 0; i < info->dlpi_phnum; i++) {
		if (info->dlpi_phdr[i].p_type != PT_DYNAMIC)
			continue;
		for (const ElfW(Dyn) *entry = (void *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr); entry->d_tag; entry++) {
			uintptr_t value = entry->d_un.d_ptr;
			uintptr_t at = value < info->dlpi_addr ? value + info->dlpi_addr : value;

			if (entry->d_tag == DT_SYMTAB)
				symbols = (void *)at;
			else if (entry->d_tag == DT_STRTAB)
				names = (void *)at;
			else if (entry->d_tag == DT_JMPREL)
				tables[0] = at;
			else if (entry->d_tag == DT_PLTRELSZ)
				sizes[0] = value;
			else if (entry->d_tag == DT_RELA)
				tables[1] = at;
			else if (entry->d_tag == DT_RELASZ)
				sizes[1] = value;
		}
	}
	for (int i = 0; symbols && names && i < 2; i++) {
		const ElfW(Rela) *table = (void *)tables[i];
		for (size_t n = 0; table && n < sizes[i] / sizeof(*table); n++) {
			uint32_t number = ELF64_R_SYM(table[n].r_info);
			if (number && !strcmp(names + symbols[number].st_name, wanted->function))
				wanted->slot = (void **)(info->dlpi_addr + table[n].r_offset);
		}
	}
	return 1; // the program itself comes first, and only it is asked about
}

void **criu_slot(const char *function)
{
	struct wanted wanted = { .function = function };
	uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);

	dl_iterate_phdr(find_slot, &wanted);
	if (wanted.slot && mprotect((void *)((uintptr_t)wanted.slot & -page), page, PROT_READ | PROT_WRITE) < 0)
		return NULL;
	return wanted.slot;
}
