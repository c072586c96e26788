// SPDX-License-Identifier: Apache-2.0
// libgpucr_chunks.so: what is done with the chunks of an image, each step for all chunks of a part in one call.
//
// Who calls: gpucr_hpc/image/native.py, which has the same tables; where this library is not installed, Python takes the
// same steps chunk by chunk, with the same result. A thread that calls gives Python's lock away and has to get it back:
// with eight threads that took most of the time. Nothing here keeps state, and any thread may call.
#define _GNU_SOURCE
#include <errno.h>
#include <lz4.h>
#include <openssl/crypto.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include "marks.h"

#define EXPORT __attribute__((visibility("default")))

enum { VERSION = 3 };  // of what is below; native.py refuses another one
enum { PAGE_BYTES = 4096, WORDS = PAGE_BYTES / 8, MIN_PAGES = 32, MAX_PAGES = 256, MEAN_PAGES = 97 };
enum { SAMPLE_BYTES = 16 << 10, SAMPLED_BYTES = 256 << 10 };  // one for each so many, two at least
enum { MAX_NAME_BYTES = 128 };
enum failure { SHORT = -1, FORGED = -2, NOT_EXPANDED = -3, BROKEN = -4 };

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "numbers in an image are little-endian");

// Where chunks lie, and what they are encrypted with. name: of the checkpoint.
struct place {
	unsigned char key[32];
	uint64_t offset;
	uint16_t rank, pack, name_bytes;
	char name[MAX_NAME_BYTES];
};

EXPORT unsigned gpucr_chunks_version(void)
{
	return VERSION;
}

// The number of the OpenSSL that is used, 0xMNN00PP0.
EXPORT unsigned long gpucr_chunks_openssl(void)
{
	return OpenSSL_version_num();
}

// --- where a part is cut ------------------------------------------------------------------------------------

// Whether a page ends a chunk, by two of its words, and whether it looks like zero.
static int is_mark(const uint64_t *page)
{
	return (page[0] % MEAN_PAGES + page[WORDS / 2] % MEAN_PAGES) % MEAN_PAGES == 1;
}

static int looks_empty(const uint64_t *page)
{
	return !(page[0] | page[WORDS / 2]);
}

// Puts the numbers of the pages at whose beginning to cut into `ends`, which has room for pages / MIN_PAGES + 2; how many.
// since, empty: pages behind the last cut that come before these, and whether the last of them looks like zero; `empty`
// then says that of the last page here.
EXPORT size_t gpucr_chunks_cut(const uint64_t *words, size_t pages, size_t since, int *empty, uint32_t *ends)
{
	size_t found = 0;
	int64_t last = -(int64_t)since;
	int was = since ? *empty : -1;
	for (size_t page = 0; page <= pages; page++) {
		const uint64_t *next = words + page * WORDS;
		int is = page < pages ? looks_empty(next) : -1;
		if ((page && is_mark(next - WORDS)) || (is >= 0 && was >= 0 && is != was)) {
			while ((int64_t)page - last > MAX_PAGES)
				ends[found++] = last += MAX_PAGES;
			if ((int64_t)page - last >= MIN_PAGES)
				ends[found++] = last = page;
		}
		if (is >= 0)
			*empty = was = is;
	}
	while ((int64_t)pages - last >= MAX_PAGES)
		ends[found++] = last += MAX_PAGES;
	return found;
}

// --- into the store -----------------------------------------------------------------------------------------

// Finds out which chunks are zero, and the mark of each other one. 0, or BROKEN.
EXPORT int gpucr_chunks_mark(const unsigned char *key, struct chunk *chunks, size_t count)
{
	EVP_CIPHER_CTX *context = chunk_cipher(key, 1);
	int done = context != NULL;
	for (struct chunk *c = chunks; done && c < chunks + count; c++)
		done = chunk_mark(context, c);
	EVP_CIPHER_CTX_free(context);
	return done ? 0 : BROKEN;
}

// `size` bytes of a chunk from `at` on in one place, in `joint` if they are in two.
static const char *whole(const struct chunk *c, size_t at, size_t size, char *joint)
{
	if (at + size <= c->first)
		return (const char *)c->plain + at;
	if (at >= c->first)
		return (const char *)c->rest + at - c->first;
	size_t first = c->first - at;
	memcpy(mempcpy(joint, c->plain + at, first), c->rest, size - first);
	return joint;
}

// The length of a chunk's LZ4 block in `room`, or 0 where it is not below 7/8 of the size. Some samples decide whether it is
// tried at all.
static int squeeze(const struct chunk *c, char *room, size_t capacity, char *joint)
{
	size_t limit = ((size_t)c->size * 7 - 1) / 8;
	if (c->size < 2 || limit > capacity || SAMPLE_BYTES > capacity)
		return 0;
	if (c->size >= 8 * SAMPLE_BYTES) {
		size_t samples = c->size > SAMPLED_BYTES ? (c->size + SAMPLED_BYTES - 1) / SAMPLED_BYTES : 2;
		size_t step = (c->size - SAMPLE_BYTES) / (samples - 1), sum = 0;
		for (size_t i = 0; i < samples; i++) {
			int got = LZ4_compress_fast(whole(c, i * step, SAMPLE_BYTES, joint), room, SAMPLE_BYTES, SAMPLE_BYTES, 1);
			sum += got ? got : SAMPLE_BYTES;
		}
		if (sum * 8 >= samples * SAMPLE_BYTES * 7)
			return 0;
	}
	return LZ4_compress_fast(whole(c, 0, c->size, joint), room, c->size, limit, 1);
}

// Puts the LZ4 blocks of chunks that are not to be skipped into `room`, one after another. joint: room for a chunk. The bytes
// that will be stored.
EXPORT size_t gpucr_chunks_pack(struct chunk *chunks, size_t count, char *room, size_t capacity, char *joint)
{
	size_t total = 0;
	for (struct chunk *c = chunks; c < chunks + count; c++) {
		if (c->skip)
			continue;
		int length = squeeze(c, room, capacity, joint);
		c->kind = length ? LZ4 : RAW;
		c->length = length ? (uint32_t)length : c->size;
		room += length;
		capacity -= length;
		total += c->length;
	}
	return total;
}

// Nonce and additional data of a chunk, as docs/format.md has them; the length of the latter.
static size_t bind(const struct place *p, uint64_t offset, uint32_t size, uint8_t kind, unsigned char *nonce, unsigned char *data)
{
	static const char head[] = "gpucr-v2 chunk";  // its end belongs to it
	unsigned char *at = data;
	memcpy(nonce, &p->rank, 2);
	memcpy(nonce + 2, &p->pack, 2);
	memcpy(nonce + 4, &offset, 8);
	at = mempcpy(at, head, sizeof(head));
	at = mempcpy(at, nonce, NONCE_BYTES);
	at = mempcpy(at, &size, 4);
	*at++ = kind;
	at = mempcpy(at, p->name, p->name_bytes);
	return at - data;
}

// Both places of a chunk's plain bytes, through a cipher, to `out`.
static int encrypt(EVP_CIPHER_CTX *context, unsigned char *out, const struct chunk *c)
{
	int count;
	return EVP_EncryptUpdate(context, out, &count, c->plain, c->first) &&
	       (c->first == c->size || EVP_EncryptUpdate(context, out + c->first, &count, c->rest, c->size - c->first));
}

// Encrypts chunks that are not to be skipped into `room`, one after another, as for a pack from p->offset on.
// packed: where `pack` has put their blocks. 0, or BROKEN.
EXPORT int gpucr_chunks_seal(const struct place *p, struct chunk *chunks, size_t count, const unsigned char *packed, unsigned char *room)
{
	unsigned char nonce[NONCE_BYTES], data[64 + MAX_NAME_BYTES];
	EVP_CIPHER_CTX *context = chunk_cipher(p->key, 1);
	uint64_t offset = p->offset;
	int done = context != NULL, n;
	for (struct chunk *c = chunks; done && c < chunks + count; c++) {
		if (c->skip)
			continue;
		size_t length = bind(p, offset, c->size, c->kind, nonce, data);
		done = EVP_EncryptInit_ex(context, NULL, NULL, NULL, nonce) && EVP_EncryptUpdate(context, NULL, &n, data, length) &&
		       (c->kind == LZ4 ? EVP_EncryptUpdate(context, room, &n, packed, c->length) : encrypt(context, room, c)) &&
		       EVP_EncryptFinal_ex(context, room + c->length, &n) &&
		       EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_AEAD_GET_TAG, TAG_BYTES, c->tag);
		packed += c->kind == LZ4 ? c->length : 0;
		room += c->length;
		offset += c->length;
	}
	EVP_CIPHER_CTX_free(context);
	return done ? 0 : BROKEN;
}

// --- and back -----------------------------------------------------------------------------------------------

static int read_all(int fd, unsigned char *room, size_t size, uint64_t offset)
{
	while (size) {
		ssize_t got = pread(fd, room, size, offset);
		if (got < 0 && errno == EINTR)
			continue;
		if (got <= 0)
			return got ? errno : SHORT;
		room += got, offset += got, size -= got;
	}
	return 0;
}

// A chunk of the index: docs/format.md, section 2.2.
struct record {
	uint64_t offset;
	uint32_t stored, size;
	uint16_t pack;
	uint8_t source, kind;
	unsigned char tag[TAG_BYTES], id[TAG_BYTES];
} __attribute__((packed));

_Static_assert(sizeof(struct record) == 52, "as layout.RECORD has it");

// What chunks of an index are opened with. sources: what each was encrypted with, whose offset and pack do not count. fds: of
// the packs of each source, `packs` of them, -1 where there is none.
struct opening {
	const struct place *sources;
	const int *fds;
	size_t source_count, packs;
	const unsigned char *mark_key;
	unsigned char *sealed, *opened; // room for a chunk each
};

static int decrypt(EVP_CIPHER_CTX *context, const struct place *p, const struct record *r, const unsigned char *sealed, unsigned char *target)
{
	unsigned char nonce[NONCE_BYTES], data[64 + MAX_NAME_BYTES];
	size_t length = bind(p, p->offset, r->size, r->kind, nonce, data);
	int n = 0;

	if (!EVP_DecryptInit_ex(context, NULL, NULL, NULL, nonce) || !EVP_DecryptUpdate(context, NULL, &n, data, length) ||
	    !EVP_DecryptUpdate(context, target, &n, sealed, r->stored) ||
	    !EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_AEAD_SET_TAG, TAG_BYTES, (void *)r->tag))
		return BROKEN;
	return EVP_DecryptFinal_ex(context, target + n, &n) > 0 ? 0 : FORGED;
}

static int open_one(const struct opening *o, EVP_CIPHER_CTX *context, const struct record *r, unsigned char *plain)
{
	struct place p = o->sources[r->source];
	int fd = o->fds[r->source * o->packs + r->pack], failed;

	if (fd < 0 || r->size > CHUNK_BYTES || r->stored > CHUNK_BYTES || (r->kind != RAW && r->kind != LZ4))
		return BROKEN;
	p.offset = r->offset, p.pack = r->pack;
	failed = read_all(fd, o->sealed, r->stored, r->offset);
	if (!failed)
		failed = decrypt(context, &p, r, o->sealed, r->kind == LZ4 ? o->opened : plain);
	if (!failed && r->kind == LZ4 && LZ4_decompress_safe((char *)o->opened, (char *)plain, r->stored, r->size) != (int)r->size)
		failed = NOT_EXPANDED;
	return failed;
}

// Opens chunks, none of them ZERO, one after another into `plain`, until one fails; *count says how many were opened. marks: of
// their plain bytes under the mark key, if there is one. 0, the error number of a read, or a failure.
EXPORT int gpucr_chunks_open(const struct opening *o, const struct record *records, size_t *count, unsigned char *plain, unsigned char (*marks)[TAG_BYTES])
{
	EVP_CIPHER_CTX *marking = o->mark_key ? chunk_cipher(o->mark_key, 1) : NULL, *context = NULL;
	const struct record *end = records + *count;
	int failed = o->mark_key && !marking ? BROKEN : 0, source = -1;

	for (*count = 0; !failed && records < end; records++, marks++) {
		struct chunk c = { .plain = plain, .first = records->size, .size = records->size };

		if (records->source >= o->source_count || records->pack >= o->packs) {
			failed = BROKEN;
			break;
		}
		if (source != records->source) {
			EVP_CIPHER_CTX_free(context);
			source = records->source;
			context = chunk_cipher(o->sources[source].key, 0);
		}
		failed = context ? open_one(o, context, records, plain) : BROKEN;
		if (!failed && marking && !chunk_gmac(marking, &c))
			failed = BROKEN;
		memcpy(*marks, c.tag, TAG_BYTES);
		plain += records->size;
		*count += !failed;
	}
	EVP_CIPHER_CTX_free(marking);
	EVP_CIPHER_CTX_free(context);
	return failed;
}

// Memory that is to be written to a file at `to`.
struct span {
	const unsigned char *from;
	uint64_t to, size;
};

// Writes spans, until one fails: *failed says at which place. 0, an error number, or SHORT.
EXPORT int gpucr_chunks_put(int fd, const struct span *spans, size_t count, uint64_t *failed)
{
	for (const struct span *s = spans; s < spans + count; s++) {
		for (uint64_t done = 0; done < s->size;) {
			ssize_t put = pwrite(fd, s->from + done, s->size - done, s->to + done);
			if (put < 0 && errno == EINTR)
				continue;
			if (put <= 0) {
				*failed = s->to + done;
				return put ? errno : SHORT;
			}
			done += put;
		}
	}
	return 0;
}
