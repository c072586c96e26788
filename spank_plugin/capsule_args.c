/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "capsule.h"

#include <getopt.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <grp.h>
#include <unistd.h>
#include <stdio.h>

#include "util.h"

bool parse_groups(struct capsule_args *a, const char *text)
{
	while (*text) {
		char *end;
		unsigned long g = strtoul(text, &end, 10);

		if (end == text || g > UINT_MAX - 1 || (*end && *end != ',') || a->ngroups == MAX_GROUPS)
			return false;
		a->groups[a->ngroups++] = (gid_t)g;
		text = *end ? end + 1 : end;
	}
	return true;
}

/* FROM:TO, both absolute; a colon within FROM is no colon before a slash. */
static bool parse_bind(struct capsule_args *a, const char *text)
{
	const char *colon = strstr(text, ":/");

	if (*text != '/' || !colon || a->nbind == MAX_BINDS)
		return false;
	a->bind[a->nbind].from = strndup(text, (size_t)(colon - text));
	a->bind[a->nbind].to = colon + 1;
	return a->bind[a->nbind++].from != NULL;
}

int capsule_parse(struct capsule_args *a, int argc, char **argv)
{
	static const struct option options[] = {
		{ "mode", 1, NULL, 'm' },     { "uid", 1, NULL, 'u' },	    { "gid", 1, NULL, 'g' },
		{ "groups", 1, NULL, 'G' },   { "hostname", 1, NULL, 'h' }, { "run-dir", 1, NULL, 'r' },
		{ "hosts", 1, NULL, 'e' },    { "netns", 1, NULL, 'n' },    { "control", 1, NULL, 'c' },
		{ "last-pid", 1, NULL, 'l' }, { "holder-pid", 1, NULL, 'H' }, { "private", 1, NULL, 'p' },  { "tmpfs-size", 1, NULL, 's' },
		{ "sync", 1, NULL, 'y' },     { "cgroup-wait", 0, NULL, 'w' }, { "hide-io-uring", 0, NULL, 'i' },
		{ "bind", 1, NULL, 'b' },     { "cover", 1, NULL, 'C' },    { NULL, 0, NULL, 0 },
	};
	long long uid = -1, gid = -1, n;
	int c;

	memset(a, 0, sizeof(*a));
	a->netns = a->control = a->sync = -1;
	a->hostname = "";
	while ((c = getopt_long(argc, argv, "+", options, NULL)) != -1) {
		bool ok = true;

		n = -1;
		switch (c) {
		case 'm':
			a->restore = !strcmp(optarg, "restore");
			ok = a->restore || !strcmp(optarg, "start");
			break;
		case 'u': ok = parse_number(optarg, 0, UINT_MAX - 1, &uid); break;
		case 'g': ok = parse_number(optarg, 0, UINT_MAX - 1, &gid); break;
		case 'G': ok = parse_groups(a, optarg); break;
		case 'h': a->hostname = optarg; break;
		case 'r': a->run_dir = optarg; break;
		case 'e': a->hosts = strcmp(optarg, "-") ? optarg : NULL; break;
		case 'n': ok = parse_number(optarg, -1, INT_MAX, &n); a->netns = (int)n; break;
		case 'c': ok = parse_number(optarg, 3, INT_MAX, &n); a->control = (int)n; break;
		case 'y': ok = parse_number(optarg, 3, INT_MAX, &n); a->sync = (int)n; break;
		case 'l': ok = parse_number(optarg, 0, 1 << 22, &a->last_pid); break;
		case 'H': ok = parse_number(optarg, 0, 1 << 22, &a->holder_pid); break;
		case 's': ok = parse_number(optarg, 0, LLONG_MAX, &a->tmpfs_size); break;
		case 'p':
			ok = *optarg == '/' && a->nprivate < MAX_PRIVATE;
			if (ok)
				a->private[a->nprivate++] = optarg;
			break;
		case 'C':
			ok = *optarg == '/' && a->ncover < MAX_COVERS;
			if (ok)
				a->cover[a->ncover++] = optarg;
			break;
		case 'b': ok = parse_bind(a, optarg); break;
		case 'w': a->cgroup_wait = true; break;
		case 'i': a->hide_io_uring = true; break;
		default: return -1;
		}
		if (!ok) {
			say("gpucr-init: bad value '%s'", optarg);
			return -1;
		}
	}
	if (uid < 0 || gid < 0 || a->control < 0 || !a->run_dir || *a->run_dir != '/' || optind != argc) {
		say("usage: gpucr-init capsule --mode start|restore --uid U --gid G --groups A,B --hostname H --run-dir D "
		    "--hosts FILE|- --netns FD|-1 --control FD --last-pid N [--holder-pid N] [--private DIR]... [--cover DIR]... "
		    "[--bind FROM:TO]... [--tmpfs-size BYTES] [--cgroup-wait] [--hide-io-uring]");
		return -1;
	}
	a->uid = (uid_t)uid;
	a->gid = (gid_t)gid;
	if (!a->ngroups)
		a->groups[a->ngroups++] = a->gid;
	return 0;
}
