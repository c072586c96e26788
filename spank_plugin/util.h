/* SPDX-License-Identifier: Apache-2.0 */
/* Small helpers shared by the programs (not by the plugin). */
#ifndef GPUCR_UTIL_H
#define GPUCR_UTIL_H

#include <stdbool.h>
#include <sys/types.h>

long long now_ms(void); /* monotonic */
/* One line "gpucr: TEXT" on fd 2, in a single write so that lines of several ranks do not mix. */
void say(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* Whole decimal number within [min, max]. */
bool parse_number(const char *text, long long min, long long max, long long *out);
void set_cloexec(int fd, bool on);
int write_all(int fd, const void *data, size_t len);
/* Write a short text to a file such as one below /proc; 0 or -1 with errno. */
int write_file(const char *path, const char *text);
/* Every signal to its default action and an empty mask: what a fresh program expects. */
void reset_signals(void);
/* Descriptors 0, 1, 2 on /dev/null as it is in the current mount namespace. */
int null_stdio(void);
/* Leave from a wait(2) status: the same exit code, or death by the same signal without a core file. */
void exit_like(int status) __attribute__((noreturn));
/* Exit code for a wait(2) status as a shell shows it: code, or 128 + signal. */
int shell_status(int status);

#endif
