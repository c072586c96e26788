/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sbatch reads options in the order script, environment, command line. Our SBATCH_SIGNAL and SBATCH_OPEN_MODE would
 * override the script's own lines, so these are looked for here. The script is the first argument that is a regular
 * file and begins with "#!". The values of options such as -p high are arguments too, but no such files, unless a user
 * calls job or output as the script: sbatch -J run.sh run.sh.
 */
#define _GNU_SOURCE
#include "options.h"
#include "sbatch.h"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define CMDLINE_BYTES (128 << 10)
#define SCRIPT_BYTES (64 << 10)

const char *sbatch_cmdline = "/proc/self/cmdline";

static size_t read_start(int fd, char *buf, size_t size, off_t at)
{
	size_t n = 0;
	ssize_t r;

	while (n < size - 1 && (r = pread(fd, buf + n, size - 1 - n, at + (off_t)n)) > 0)
		n += (size_t)r;
	buf[n] = '\0';
	return n;
}

/* getopt_long takes any abbreviation that is clear; shortest: how many letters it needs. */
static bool is_option(const char *word, const char *name, size_t shortest)
{
	size_t n;

	if (strncmp(word, "--", 2))
		return false;
	n = strcspn(word + 2, "=");
	return n >= shortest && n <= strlen(name) && !strncmp(word + 2, name, n);
}

/* Whether the next word is the value of this one, which could be a script's name. */
static bool takes_name(const char *word)
{
	static const char *const names[] = { "job-name", "comment", "output", "error", "input" };

	if (word[0] == '-' && word[1] != '-')
		return word[1] && !word[2] && strchr("Jeio", word[1]);
	for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++)
		if (is_option(word, names[i], 3) && !strchr(word, '='))
			return true;
	return false;
}

static void scan_line(struct submission *s, char *line)
{
	char *save, *word = strtok_r(line, " \t\"'", &save);

	for (; word && *word != '#'; word = strtok_r(NULL, " \t\"'", &save)) {
		s->script_signal |= is_option(word, "signal", 2);
		s->script_open_mode |= is_option(word, "open-mode", 2);
	}
}

static void scan_script(struct submission *s, char *text)
{
	char *save, *line = strtok_r(text, "\n", &save);

	for (; line; line = strtok_r(NULL, "\n", &save)) {
		if (!strncmp(line, "#SBATCH", 7))
			scan_line(s, line + 7);
		else if (line[strspn(line, " \t\r")] != '#' && line[strspn(line, " \t\r")])
			break; /* the first command ends the options */
	}
}

static bool open_script(const char *path, char *text)
{
	struct stat st;
	bool found = false;
	int fd;

	if (stat(path, &st) < 0 || !S_ISREG(st.st_mode) || (fd = open(path, O_RDONLY | O_CLOEXEC)) < 0)
		return false;
	found = read_start(fd, text, SCRIPT_BYTES, 0) > 2 && text[0] == '#' && text[1] == '!';
	close(fd);
	return found;
}

/* What is in the pipe at standard input now, and stays there. */
static size_t look_into_pipe(char *text, size_t size)
{
	size_t n = 0;
	ssize_t some;
	int p[2];

	if (pipe2(p, O_CLOEXEC) == 0) {
		some = tee(0, p[1], size - 1, SPLICE_F_NONBLOCK);
		if (some > 0 && (some = read(p[0], text, (size_t)some)) > 0)
			n = (size_t)some;
		close(p[0]);
		close(p[1]);
	}
	text[n] = '\0';
	return n;
}

void sbatch_scan(struct submission *s)
{
	static char cmdline[CMDLINE_BYTES], script[SCRIPT_BYTES];
	int fd = open(sbatch_cmdline, O_RDONLY | O_CLOEXEC);
	bool found = false, is_value = false;
	struct stat st = { 0 };
	off_t at;

	memset(s, 0, sizeof(*s));
	if (fd < 0)
		return;
	size_t n = read_start(fd, cmdline, sizeof(cmdline), 0);
	close(fd);
	for (char *p = cmdline + strlen(cmdline) + 1; p < cmdline + n; p += strlen(p) + 1) {
		if (*p != '-') {
			if (is_value) {
				is_value = false;
				continue;
			}
			/* What follows the script are its own arguments. */
			if ((found = open_script(p, script)))
				break;
			continue;
		}
		is_value = takes_name(p);
		s->on |= is_option(p, OPTION_ON, 15) || is_option(p, OPTION_TIMEOUT, 15) || is_option(p, OPTION_RESTORE, 4);
		s->off |= is_option(p, OPTION_OFF, 4);
		s->cli_signal |= is_option(p, "signal", 2);
	}
	/* sbatch < script, sbatch <<END: look without taking anything. */
	if (!found && fstat(0, &st) == 0 && S_ISREG(st.st_mode) && (at = lseek(0, 0, SEEK_CUR)) >= 0)
		found = read_start(0, script, sizeof(script), at) > 2 && script[0] == '#' && script[1] == '!';
	else if (!found && S_ISFIFO(st.st_mode))
		found = look_into_pipe(script, sizeof(script)) > 2 && script[0] == '#' && script[1] == '!';
	if (found)
		scan_script(s, script);
}
