/* Byte pair encoding: bpe.py says what it is and has the same in Python.

All chunks lie end to end, one slot for each token. The slots where a pair begins are a linked list
of that pair, in the order of the text; so a merge touches only the places where its pair stands. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- how text is cut into chunks: foreign.PATTERNS but gpt2, on UTF-32 ---------------------- */

enum { LETTER = 1, NUMBER = 2, SPACE = 4, HAN = 8 };

typedef struct {
    const uint32_t *text;
    int64_t length;
    const uint8_t *classes;  // of the first n_classes characters of Unicode; others are symbols
    int64_t n_classes;
    int64_t most_digits, most_han;  // in a chunk; most_han 0: Han are letters like any other
} Text;

static int is(const Text *t, int64_t i, int wanted) {
    if (i >= t->length || t->text[i] >= t->n_classes) return 0;
    return t->classes[t->text[i]] & wanted;
}

static int is_newline(const Text *t, int64_t i) {
    return i < t->length && (t->text[i] == '\n' || t->text[i] == '\r');
}

static int is_symbol(const Text *t, int64_t i) {
    return i < t->length && !is(t, i, LETTER | NUMBER | SPACE);
}

static int is_word(const Text *t, int64_t i) {
    return is(t, i, LETTER) && !(t->most_han && is(t, i, HAN));
}

static uint32_t lower(const Text *t, int64_t i) {
    if (i >= t->length) return 0;
    return t->text[i] == 0x17F ? 's' : t->text[i] | 0x20;  // U+017F is a long s
}

/* Return where the chunk ends that begins at i. */
static int64_t chunk_end(const Text *t, int64_t i) {
    int64_t end = i;
    while (end - i < t->most_han && is(t, end, HAN)) end++;
    if (end > i) return end;

    if (t->text[i] == '\'') {  // 's 't 'm 'd 're 've 'll
        uint32_t a = lower(t, i + 1), b = lower(t, i + 2);
        if (a == 's' || a == 't' || a == 'm' || a == 'd') return i + 2;
        if (((a == 'r' || a == 'v') && b == 'e') || (a == 'l' && b == 'l')) return i + 3;
    }

    // a word, with any one character before it but a letter, a number or the end of a line
    end = i + !(is(t, i, LETTER | NUMBER) || is_newline(t, i));
    if (is_word(t, end)) {
        while (is_word(t, end)) end++;
        return end;
    }

    for (end = i; end - i < t->most_digits && is(t, end, NUMBER);) end++;
    if (end > i) return end;

    // symbols, with a space before them and ends of lines behind
    end = i + (t->text[i] == ' ');
    if (is_symbol(t, end)) {
        while (is_symbol(t, end)) end++;
        while (is_newline(t, end)) end++;
        return end;
    }

    // white space up to its last end of a line; or all but one character, which the next chunk has
    int64_t after_newline = 0;
    for (end = i; is(t, end, SPACE); end++)
        if (is_newline(t, end)) after_newline = end + 1;
    if (after_newline) return after_newline;
    return end < t->length && end - i > 1 ? end - 1 : end;
}

/* Count equal chunks of several texts. Return how many distinct ones there are.

text_ends: where each text ends; t->length is set to each in turn
begins, ends, times: of each distinct chunk, the place where it is first, and how often it occurs
table: a hash table of mask + 1 zeros: of each distinct chunk its number from 1 */
int64_t count(Text *t, int64_t n_texts, int64_t mask, const int64_t *text_ends, int32_t *begins,
              int32_t *ends, int32_t *times, int32_t *table) {
    int64_t n = 0;
    for (int64_t number = 0, i = 0; number < n_texts; number++) {
        t->length = text_ends[number];
        for (int64_t end; i < t->length; i = end) {
            end = chunk_end(t, i);
            uint64_t hash = 0;
            for (int64_t j = i; j < end; j++) hash = (hash ^ t->text[j]) * 0x9E3779B97F4A7C15u;
            int64_t at = hash >> 32 & mask, size = (end - i) * sizeof(*t->text), k;
            for (; (k = table[at] - 1) >= 0; at = (at + 1) & mask)
                if (ends[k] - begins[k] == end - i && !memcmp(t->text + begins[k], t->text + i, size))
                    break;
            if (k < 0) {
                table[at] = n + 1;
                begins[n] = i, ends[n] = end, times[n] = 0;
                k = n++;
            }
            times[k]++;
        }
    }
    return n;
}

/* ---- merges ---------------------------------------------------------------------------------- */

typedef struct {
    int32_t token;
    int32_t before, after;    // the neighbouring slots of the chunk, or -1
    int32_t pair;             // the pair that begins here
    int32_t previous, next;   // slots where the same pair begins, or -1
    int64_t weight;           // how often the chunk occurs
} Slot;

typedef struct {
    int64_t count;
    int32_t left, right;
    int32_t first, last;  // slots, or -1
} Pair;

typedef struct {
    int64_t count;  // when the pair was last looked at: by now it may have fallen
    int32_t pair;
} Waiting;

typedef struct {
    Slot *slots;
    Pair *pairs;
    Waiting *heap;  // a binary heap: the most frequent pair is the first
    int64_t n_pairs, pair_room, n_waiting, heap_room;
} Training;

static void *resized(void *memory, size_t bytes) {
    memory = realloc(memory, bytes);
    if (memory) return memory;
    fprintf(stderr, "tokenizer: not enough memory for the merges; give it less text (max_mb)\n");
    exit(1);
}

/* Return `items` with room for one more. */
static void *with_room(void *items, int64_t n, int64_t *room, size_t size) {
    if (n < *room) return items;
    *room = 2 * *room + 1024;
    return resized(items, *room * size);
}

static int goes_first(const Training *t, Waiting a, Waiting b) {
    if (a.count != b.count) return a.count > b.count;
    const Pair *x = &t->pairs[a.pair], *y = &t->pairs[b.pair];
    return x->left != y->left ? x->left < y->left : x->right < y->right;
}

static void push(Training *t, int32_t pair) {
    t->heap = with_room(t->heap, t->n_waiting, &t->heap_room, sizeof(Waiting));
    Waiting item = {t->pairs[pair].count, pair};
    int64_t at = t->n_waiting++;
    for (; at && goes_first(t, item, t->heap[(at - 1) / 2]); at = (at - 1) / 2)
        t->heap[at] = t->heap[(at - 1) / 2];
    t->heap[at] = item;
}

static Waiting pop(Training *t) {
    Waiting top = t->heap[0], item = t->heap[--t->n_waiting];
    int64_t at = 0, child;
    for (; (child = 2 * at + 1) < t->n_waiting; at = child) {
        int has_two = child + 1 < t->n_waiting;
        if (has_two && goes_first(t, t->heap[child + 1], t->heap[child])) child++;
        if (!goes_first(t, t->heap[child], item)) break;
        t->heap[at] = t->heap[child];
    }
    t->heap[at] = item;
    return top;
}

/* Take the slot out of the list of its pair. */
static void leave(Training *t, int32_t at) {
    Slot *slot = &t->slots[at];
    Pair *pair = &t->pairs[slot->pair];
    pair->count -= slot->weight;
    *(slot->previous < 0 ? &pair->first : &t->slots[slot->previous].next) = slot->next;
    *(slot->next < 0 ? &pair->last : &t->slots[slot->next].previous) = slot->previous;
}

/* Enter the slot at the end of the list of (left, right). known: the pairs by the token that is
not the new one; those from `begin` on are of this merge. */
static void enter(Training *t, int32_t at, int32_t left, int32_t right, int32_t *known,
                  int64_t begin) {
    if (*known < begin) {
        t->pairs = with_room(t->pairs, t->n_pairs, &t->pair_room, sizeof(Pair));
        t->pairs[t->n_pairs] = (Pair){0, left, right, -1, -1};
        *known = t->n_pairs++;
    }
    Slot *slot = &t->slots[at];
    Pair *pair = &t->pairs[*known];
    pair->count += slot->weight;
    slot->pair = *known;
    slot->previous = pair->last;
    slot->next = -1;
    *(pair->last < 0 ? &pair->first : &t->slots[pair->last].next) = at;
    pair->last = at;
}

static void push_from(Training *t, int64_t begin, int64_t min_count) {
    for (int64_t pair = begin; pair < t->n_pairs; pair++)
        if (t->pairs[pair].count >= min_count) push(t, pair);
}

/* Replace the pair by the token `new` wherever it occurs, from left to right. known: see enter */
static void merge(Training *t, int32_t pair, int32_t new, int32_t *known[2]) {
    int64_t begin = t->n_pairs;
    for (int32_t at; (at = t->pairs[pair].first) >= 0;) {
        Slot *slot = &t->slots[at], *second = &t->slots[slot->after];
        int32_t before = slot->before, after = second->after;
        leave(t, at);
        if (before >= 0) leave(t, before);
        if (after >= 0) leave(t, slot->after);
        slot->token = new;
        slot->after = after;
        if (after >= 0) {
            int32_t right = t->slots[after].token;
            t->slots[after].before = at;
            enter(t, at, new, right, &known[0][right], begin);
        }
        if (before >= 0) {
            int32_t left = t->slots[before].token;
            enter(t, before, left, new, &known[1][left], begin);
        }
    }
}

/* Learn at most max_merges merges and write them as left, right. Return how many there are.
tokens: of all chunks end to end, below first_id; lengths, weights: of each chunk */
int64_t learn(const int32_t *tokens, const int32_t *lengths, const int64_t *weights,
              int64_t n_chunks, int64_t n_tokens, int64_t first_id, int64_t max_merges,
              int64_t min_count, int32_t *merges) {
    Training t = {resized(NULL, (n_tokens + 1) * sizeof(Slot))};
    int64_t n_ids = first_id + max_merges, n_merges = 0;
    int32_t *of_token = resized(NULL, n_ids * sizeof(int32_t)), *known[2];
    for (int i = 0; i < 2; i++) known[i] = resized(NULL, n_ids * sizeof(int32_t));
    for (int64_t i = 0; i < n_ids; i++) known[0][i] = known[1][i] = of_token[i] = -1;

    // slots, those with the same token as a list, in order
    int32_t at = n_tokens;
    for (int64_t chunk = n_chunks - 1; chunk >= 0; chunk--)
        for (int32_t i = lengths[chunk] - 1; i >= 0; i--) {
            int is_last = i == lengths[chunk] - 1;
            at--;
            t.slots[at] = (Slot){tokens[at], i ? at - 1 : -1, is_last ? -1 : at + 1};
            t.slots[at].weight = weights[chunk];
            if (is_last) continue;
            t.slots[at].next = of_token[tokens[at]];
            of_token[tokens[at]] = at;
        }

    for (int32_t left = 0; left < first_id; left++) {
        int64_t begin = t.n_pairs;
        for (int32_t next, slot = of_token[left]; slot >= 0; slot = next) {
            next = t.slots[slot].next;
            int32_t right = t.slots[slot + 1].token;
            enter(&t, slot, left, right, &known[0][right], begin);
        }
        push_from(&t, begin, min_count);
    }

    while (t.n_waiting && n_merges < max_merges) {
        Waiting top = pop(&t);
        Pair pair = t.pairs[top.pair];
        if (pair.count < min_count) continue;
        if (pair.count < top.count) {
            push(&t, top.pair);
            continue;
        }
        int64_t begin = t.n_pairs;
        merges[2 * n_merges] = pair.left;
        merges[2 * n_merges + 1] = pair.right;
        merge(&t, top.pair, first_id + n_merges++, known);
        push_from(&t, begin, min_count);
    }
    free(t.slots), free(t.pairs), free(t.heap), free(of_token), free(known[0]), free(known[1]);
    return n_merges;
}
