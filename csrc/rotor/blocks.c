#include "blocks.h"

#include <string.h>

#include "vector.h"

#define MIB (INT64_C(1) << 20)
#define NO_BLOCK (-1)

enum { UNIT = 512, SMALL = 0, LARGE = 1 };

static const int64_t largest_small = MIB;
static const int64_t pieces[2] = {2 * MIB, 20 * MIB};
static const int64_t own_segment = 10 * MIB;
static const int64_t own_unit = 2 * MIB;
static const int64_t endless = INT64_C(1) << 46;

static int64_t rounded(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

void rotor_blocks_init(rotor_blocks_t *self, enum rotor_segments segments,
                       int64_t capacity_bytes) {
    memset(self, 0, sizeof(*self));
    self->segments = segments;
    self->capacity_bytes = capacity_bytes > 0 ? capacity_bytes : endless;
    self->unused = NO_BLOCK;
}

void rotor_blocks_free(rotor_blocks_t *self) {
    for (int pool = SMALL; pool <= LARGE; pool++) {
        rotor_free(self->free[pool].items);
        rotor_free(self->unmapped[pool].items);
    }
    rotor_free(self->blocks);
    memset(self, 0, sizeof(*self));
}

/* -- lists */

static bool comes_before(const rotor_blocks_t *self, const rotor_block_list_t *list,
                         const rotor_block_t *a, const rotor_block_t *b) {
    bool by_size = list == &self->free[SMALL] || list == &self->free[LARGE];
    if (by_size && a->size != b->size) {
        return a->size < b->size;
    }
    return a->address < b->address;
}

/* The first place in a list whose block does not come before `key`. */
static int64_t place_of(const rotor_blocks_t *self, const rotor_block_list_t *list,
                        const rotor_block_t *key) {
    int64_t low = 0;
    int64_t high = list->count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (comes_before(self, list, &self->blocks[list->items[middle]], key)) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

static void remove_at(rotor_block_list_t *list, int64_t place) {
    list->count--;
    memmove(&list->items[place], &list->items[place + 1],
            (size_t)(list->count - place) * sizeof(*list->items));
}

static rotor_block_list_t *list_of(rotor_blocks_t *self, const rotor_block_t *block) {
    bool is_free = block->state == ROTOR_BLOCK_FREE;
    return is_free ? &self->free[block->pool] : &self->unmapped[block->pool];
}

static void unlist(rotor_blocks_t *self, int32_t number) {
    rotor_block_list_t *list = list_of(self, &self->blocks[number]);
    remove_at(list, place_of(self, list, &self->blocks[number]));
}

/* Room was made by make_room(). */
static void enlist(rotor_blocks_t *self, int32_t number) {
    rotor_block_list_t *list = list_of(self, &self->blocks[number]);
    int64_t place = place_of(self, list, &self->blocks[number]);
    memmove(&list->items[place + 1], &list->items[place],
            (size_t)(list->count - place) * sizeof(*list->items));
    list->items[place] = number;
    list->count++;
}

/* Makes room for `more` blocks, in all lists too. */
static int make_room(rotor_blocks_t *self, int64_t more) {
    int ret = ROTOR_RESERVE(self->blocks, self->block_count, self->block_capacity, more);
    for (int pool = SMALL; ret == ROTOR_OK && pool <= LARGE; pool++) {
        rotor_block_list_t *lists[2] = {&self->free[pool], &self->unmapped[pool]};
        for (int k = 0; ret == ROTOR_OK && k < 2; k++) {
            ret = ROTOR_RESERVE(lists[k]->items, self->block_count, lists[k]->capacity, more);
        }
    }
    return ret;
}

/* -- blocks; room was made by make_room() */

static int32_t new_block(rotor_blocks_t *self, uint8_t state, int pool, int64_t address,
                         int64_t size) {
    int32_t number = self->unused;
    if (number != NO_BLOCK) {
        self->unused = self->blocks[number].next;
    } else {
        number = (int32_t)self->block_count++;
    }
    self->blocks[number] = (rotor_block_t){.address = address,
                                           .size = size,
                                           .previous = NO_BLOCK,
                                           .next = NO_BLOCK,
                                           .state = state,
                                           .pool = (uint8_t)pool};
    return number;
}

static void forget_block(rotor_blocks_t *self, int32_t number) {
    self->blocks[number].state = ROTOR_BLOCK_GONE;
    self->blocks[number].next = self->unused;
    self->unused = number;
}

/* Cuts a block after `size` bytes; the rest, in the given state, is not in a list. */
static int32_t cut(rotor_blocks_t *self, int32_t number, int64_t size, uint8_t state) {
    rotor_block_t *block = &self->blocks[number];
    int32_t rest =
        new_block(self, state, block->pool, block->address + size, block->size - size);
    block->size = size;
    self->blocks[rest].previous = number;
    self->blocks[rest].next = block->next;
    if (block->next != NO_BLOCK) {
        self->blocks[block->next].previous = rest;
    }
    block->next = rest;
    return rest;
}

/* Joins a listed neighbour of the same state with a block that is in no list. */
static void join_one(rotor_blocks_t *self, int32_t number, int32_t other) {
    if (other == NO_BLOCK || self->blocks[other].state != self->blocks[number].state) {
        return;
    }
    unlist(self, other);
    rotor_block_t *block = &self->blocks[number];
    rotor_block_t *gone = &self->blocks[other];
    if (block->previous == other) {
        block->address = gone->address;
        block->previous = gone->previous;
        if (block->previous != NO_BLOCK) {
            self->blocks[block->previous].next = number;
        }
    } else {
        block->next = gone->next;
        if (block->next != NO_BLOCK) {
            self->blocks[block->next].previous = number;
        }
    }
    block->size += gone->size;
    forget_block(self, other);
}

static void join_and_enlist(rotor_blocks_t *self, int32_t number) {
    join_one(self, number, self->blocks[number].previous);
    join_one(self, number, self->blocks[number].next);
    enlist(self, number);
}

/* -- figures */

static void count(int64_t *current, int64_t *peak, int64_t change) {
    *current += change;
    *peak = rotor_max(*peak, *current);
}

static void count_reserved(rotor_blocks_t *self, int pool, int64_t change) {
    count(&self->figures.reserved, &self->figures.reserved_peak, change);
    self->figures.reserved_small += pool == SMALL ? change : 0;
}

static void count_taken(rotor_blocks_t *self, const rotor_block_t *block, int sign) {
    rotor_blocks_figures_t *figures = &self->figures;
    count(&figures->allocated, &figures->allocated_peak, sign * block->size);
    count(&figures->requested, &figures->requested_peak, sign * block->requested);
}

static bool has_room(const rotor_blocks_t *self, int64_t bytes) {
    return self->figures.reserved + bytes <= self->capacity_bytes;
}

/* -- memory of the device */

static int32_t new_segment(rotor_blocks_t *self, int pool, int64_t size) {
    int64_t bytes = pieces[pool];
    if (pool == LARGE && size >= own_segment) {
        bytes = rounded(size, own_unit);
    }
    if (!has_room(self, bytes)) {
        return NO_BLOCK;
    }
    int32_t block = new_block(self, ROTOR_BLOCK_TAKEN, pool, self->next_address, bytes);
    self->next_address += bytes;
    count_reserved(self, pool, bytes);
    return block;
}

static bool is_block_taken(const rotor_blocks_t *self, int32_t number) {
    return number == NO_BLOCK || self->blocks[number].state == ROTOR_BLOCK_TAKEN;
}

/* True if the block and those after it, up to one in use, have so many bytes. */
static bool fits_from(const rotor_blocks_t *self, int32_t number, int64_t size) {
    int64_t found = 0;
    while (found < size && !is_block_taken(self, number)) {
        found += self->blocks[number].size;
        number = self->blocks[number].next;
    }
    return found >= size;
}

/* The first of a row of free and unmapped blocks with so many bytes, at the lowest address. */
static int32_t find_range(rotor_blocks_t *self, int pool, int64_t size) {
    const rotor_block_list_t *unmapped = &self->unmapped[pool];
    for (int64_t k = 0; k < unmapped->count; k++) {
        int32_t begin = unmapped->items[k];
        int32_t before = self->blocks[begin].previous;
        begin = is_block_taken(self, before) ? begin : before;
        if (fits_from(self, begin, size)) {
            return begin;
        }
    }
    int64_t bytes = rounded(self->capacity_bytes + self->capacity_bytes / 8, pieces[pool]);
    int64_t address = rounded(self->next_address, pieces[pool]);
    int32_t range = new_block(self, ROTOR_BLOCK_UNMAPPED, pool, address, bytes);
    self->next_address = address + bytes;
    enlist(self, range);
    return range;
}

/* Maps the beginning of an unmapped block; false where the device has not enough. */
static bool map_range(rotor_blocks_t *self, int32_t number, int64_t size) {
    int pool = self->blocks[number].pool;
    int64_t bytes = rounded(rotor_min(size, self->blocks[number].size), pieces[pool]);
    if (!has_room(self, bytes)) {
        return false;
    }
    unlist(self, number);
    if (bytes < self->blocks[number].size) {
        enlist(self, cut(self, number, bytes, ROTOR_BLOCK_UNMAPPED));
    }
    self->blocks[number].state = ROTOR_BLOCK_FREE;
    join_and_enlist(self, number);
    count_reserved(self, pool, bytes);
    return true;
}

static int32_t grow_range(rotor_blocks_t *self, int pool, int64_t size) {
    int32_t number = find_range(self, pool, size);
    if (self->blocks[number].state == ROTOR_BLOCK_UNMAPPED && !map_range(self, number, size)) {
        return NO_BLOCK;
    }
    while (self->blocks[number].size < size) {
        int32_t next = self->blocks[number].next;
        if (next == NO_BLOCK || !map_range(self, next, size - self->blocks[number].size)) {
            return NO_BLOCK;
        }
        number = next;
    }
    unlist(self, number);
    return number;
}

static int32_t from_device(rotor_blocks_t *self, int pool, int64_t size) {
    return self->segments == ROTOR_SEGMENTS_EXPANDABLE ? grow_range(self, pool, size)
                                                       : new_segment(self, pool, size);
}

/* Unmaps the whole pieces within a free block. */
static void unmap_range(rotor_blocks_t *self, int32_t number) {
    rotor_block_t *block = &self->blocks[number];
    int64_t piece = pieces[block->pool];
    int64_t begin = rounded(block->address, piece);
    int64_t end = (block->address + block->size) / piece * piece;
    if (begin >= end) {
        return;
    }
    unlist(self, number);
    if (end < block->address + block->size) {
        enlist(self, cut(self, number, end - block->address, ROTOR_BLOCK_FREE));
    }
    if (begin > self->blocks[number].address) {
        int32_t before = number;
        number = cut(self, before, begin - self->blocks[before].address, ROTOR_BLOCK_UNMAPPED);
        enlist(self, before);
    }
    self->blocks[number].state = ROTOR_BLOCK_UNMAPPED;
    join_and_enlist(self, number);
    count_reserved(self, self->blocks[number].pool, begin - end);
}

static void drop_empty_range(rotor_blocks_t *self, int32_t number) {
    const rotor_block_t *block = &self->blocks[number];
    if (block->state == ROTOR_BLOCK_UNMAPPED && block->previous == NO_BLOCK &&
        block->next == NO_BLOCK) {
        unlist(self, number);
        forget_block(self, number);
    }
}

static void release_pool(rotor_blocks_t *self, int pool, int32_t *numbers) {
    rotor_block_list_t *list = &self->free[pool];
    int64_t length = list->count;
    if (length > 0) {
        memcpy(numbers, list->items, (size_t)length * sizeof(*numbers));
    }
    for (int64_t k = 0; k < length; k++) {
        rotor_block_t *block = &self->blocks[numbers[k]];
        if (self->segments == ROTOR_SEGMENTS_EXPANDABLE) {
            unmap_range(self, numbers[k]);
            drop_empty_range(self, numbers[k]);
        } else if (block->previous == NO_BLOCK && block->next == NO_BLOCK) {
            unlist(self, numbers[k]);
            count_reserved(self, pool, -block->size);
            forget_block(self, numbers[k]);
        }
    }
}

int rotor_blocks_release(rotor_blocks_t *self) {
    int64_t most = rotor_max(self->free[SMALL].count, self->free[LARGE].count);
    int ret = make_room(self, 4 * most);
    if (ret != ROTOR_OK) {
        return ret;
    }
    int32_t *numbers = rotor_malloc_array(most, sizeof(*numbers));
    if (numbers == NULL) {
        return ROTOR_ERR_NO_MEMORY;
    }
    release_pool(self, LARGE, numbers);
    release_pool(self, SMALL, numbers);
    rotor_free(numbers);
    return ROTOR_OK;
}

/* -- allocation */

/* The bytes to which a free block could grow. */
static int64_t block_reach(const rotor_blocks_t *self, int32_t number) {
    const rotor_block_t *block = &self->blocks[number];
    bool grows = block->next != NO_BLOCK && self->blocks[block->next].state == ROTOR_BLOCK_UNMAPPED;
    return block->size + (grows ? self->blocks[block->next].size : 0);
}

static int32_t from_cache(rotor_blocks_t *self, int pool, int64_t size) {
    rotor_block_list_t *list = &self->free[pool];
    rotor_block_t key = {.size = size, .address = INT64_MIN};
    int64_t place = place_of(self, list, &key);
    if (place == list->count) {
        return NO_BLOCK;
    }
    if (self->segments == ROTOR_SEGMENTS_EXPANDABLE) {
        while (place + 1 < list->count &&
               block_reach(self, list->items[place + 1]) < block_reach(self, list->items[place])) {
            place++;
        }
    }
    int32_t number = list->items[place];
    remove_at(list, place);
    return number;
}

static void split(rotor_blocks_t *self, int32_t number, int64_t size) {
    const rotor_block_t *block = &self->blocks[number];
    int64_t rest = block->size - size;
    bool is_fine = block->pool == SMALL || self->segments == ROTOR_SEGMENTS_EXPANDABLE;
    if (is_fine ? rest >= UNIT : rest > largest_small) {
        enlist(self, cut(self, number, size, ROTOR_BLOCK_FREE));
    }
}

int rotor_blocks_take(rotor_blocks_t *self, int64_t bytes, int32_t *block) {
    if (bytes < 1 || bytes > ROTOR_MAX_VALUE) {
        return bytes < 1 ? ROTOR_ERR_NEGATIVE_SIZE : ROTOR_ERR_TOO_LARGE;
    }
    int ret = make_room(self, 4);
    if (ret != ROTOR_OK) {
        return ret;
    }
    int64_t size = rounded(bytes, UNIT);
    int pool = size <= largest_small ? SMALL : LARGE;
    int32_t number = from_cache(self, pool, size);
    if (number == NO_BLOCK) {
        number = from_device(self, pool, size);
    }
    if (number == NO_BLOCK) {
        self->figures.retries++;
        ret = rotor_blocks_release(self);
        if (ret == ROTOR_OK) {
            ret = make_room(self, 4);
        }
        if (ret != ROTOR_OK) {
            return ret;
        }
        number = from_device(self, pool, size);
    }
    if (number == NO_BLOCK) {
        self->figures.refused++;
        return ROTOR_ERR_INFEASIBLE;
    }
    split(self, number, size);
    self->blocks[number].state = ROTOR_BLOCK_TAKEN;
    self->blocks[number].requested = bytes;
    count_taken(self, &self->blocks[number], 1);
    *block = number;
    return ROTOR_OK;
}

void rotor_blocks_give(rotor_blocks_t *self, int32_t block) {
    count_taken(self, &self->blocks[block], -1);
    self->blocks[block].requested = 0;
    self->blocks[block].state = ROTOR_BLOCK_FREE;
    join_and_enlist(self, block);
}

/* -- replay */

static int replay_event(rotor_blocks_t *self, int64_t event, int32_t *made, int64_t *made_count) {
    if (event == ROTOR_BLOCKS_RELEASE) {
        return rotor_blocks_release(self);
    }
    if (event >= 0) {
        int32_t number = NO_BLOCK;
        int ret = event == 0 ? ROTOR_OK : rotor_blocks_take(self, event, &number);
        if (ret != ROTOR_OK && ret != ROTOR_ERR_INFEASIBLE) {
            return ret;
        }
        /* What makes nothing can be freed once, too. */
        made[(*made_count)++] = number == NO_BLOCK ? -2 : number;
        return ROTOR_OK;
    }
    int64_t index = -1 - event;
    if (index >= *made_count || made[index] == NO_BLOCK) {
        return ROTOR_ERR_BAD_STATE;
    }
    if (made[index] >= 0) {
        rotor_blocks_give(self, made[index]);
    }
    made[index] = NO_BLOCK;
    return ROTOR_OK;
}

int rotor_blocks_replay_after(enum rotor_segments segments, int64_t capacity_bytes, int64_t piece,
                              int64_t most, const int64_t *events, int64_t length,
                              int64_t *levels, rotor_blocks_figures_t *figures) {
    rotor_blocks_t self;
    int64_t made_count = 0;
    int32_t first;
    int ret = ROTOR_OK;
    int32_t *made = rotor_malloc_array(length, sizeof(*made));
    if (made == NULL) {
        return ROTOR_ERR_NO_MEMORY;
    }
    rotor_blocks_init(&self, segments, capacity_bytes);
    if (piece > 0 && (ret = rotor_blocks_take(&self, piece, &first)) == ROTOR_OK) {
        rotor_blocks_give(&self, first);
    }
    for (int64_t k = 0; ret == ROTOR_OK && k < length && self.figures.reserved <= most; k++) {
        ret = replay_event(&self, events[k], made, &made_count);
        if (ret == ROTOR_OK && levels != NULL) {
            levels[2 * k] = self.figures.allocated;
            levels[2 * k + 1] = self.figures.reserved;
        }
    }
    if (ret == ROTOR_OK) {
        *figures = self.figures;
    }
    rotor_blocks_free(&self);
    rotor_free(made);
    return ret;
}

int rotor_blocks_replay(enum rotor_segments segments, int64_t capacity_bytes,
                        const int64_t *events, int64_t length, int64_t *levels,
                        rotor_blocks_figures_t *figures) {
    return rotor_blocks_replay_after(segments, capacity_bytes, 0, INT64_MAX, events, length,
                                     levels, figures);
}
