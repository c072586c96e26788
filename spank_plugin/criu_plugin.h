// SPDX-License-Identifier: Apache-2.0
// What our plugins have to do with CRIU itself.
#ifndef GPUCR_CRIU_PLUGIN_H
#define GPUCR_CRIU_PLUGIN_H

// criu-plugin.h, version 0.2: what CRIU looks for in a plugin.
struct plugin {
	const char *name;
	int (*init)(int stage);
	void (*exit)(int stage, int result);
	unsigned int version, max_hooks; // none
	void *hooks[1];
};

// The place through which CRIU calls a function of the C library, to write to; NULL when it calls none of that name.
void **criu_slot(const char *function);

#endif
