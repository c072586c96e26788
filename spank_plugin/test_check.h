/* SPDX-License-Identifier: Apache-2.0 */
#ifndef GPUCR_TEST_CHECK_H
#define GPUCR_TEST_CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(x)                                                                \
	do {                                                                    \
		if (!(x)) {                                                     \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #x); \
			exit(1);                                                \
		}                                                               \
	} while (0)
#define CHECK_STR(want, got) check_str(__FILE__, __LINE__, want, got)

static inline void check_str(const char *file, int line, const char *want, const char *got)
{
	if (got ? want && !strcmp(want, got) : !want)
		return;
	fprintf(stderr, "%s:%d: expected '%s', got '%s'\n", file, line, want ? want : "(none)", got ? got : "(none)");
	exit(1);
}

#endif
