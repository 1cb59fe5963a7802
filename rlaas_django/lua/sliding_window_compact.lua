--[[
  Sliding window log in a byte or two per unit: the verdicts of sliding_window.lua in a sixtieth of its memory.
  Version  1

  State  STRING at <key>, a queue; expires two windows after the last charge
           first:last:count:head:tail:size   stamps in ms of the oldest and newest unit, how many there are, and byte
                                             offsets: of the oldest gap, behind the newest, of the value's end
           gaps                              from each unit to the next, base 128, low digits first, a high bit on
                                             all but the last byte
           spare                             so that a charge writes in place: growth by SETRANGE doubles the memory

  A unit is dead once it is a whole window old. `head` moves past dead ones with the next charge, or when a refusal has
  passed many of them, so that none is passed again and again; the bytes before it are dropped when the spare is used
  up. So a request costs the same whatever the limit.
]]
local HEADER = "%014.0f:%014.0f:%09.0f:%09.0f:%09.0f:%09.0f:"
local HEADER_SIZE = 70
local MANY = 64

local function read(p)
  local header = redis.call("GETRANGE", p.key, 0, HEADER_SIZE - 1)
  if header == "" then
    return nil
  end
  local first, last, count, head, tail, size = string.match(header, "^(%d+):(%d+):(%d+):(%d+):(%d+):(%d+):$")
  return {
    key = p.key, first = tonumber(first), last = tonumber(last), count = tonumber(count),
    head = tonumber(head), tail = tonumber(tail), size = tonumber(size), from = 0, upto = 0,
  }
end

local function header(queue)
  return string.format(HEADER, queue.first, queue.last, queue.count, queue.head, queue.tail, queue.size)
end

-- The byte at an offset, read in chunks that lie ahead of it or, going backwards, behind it.
local function byte_at(queue, offset, backwards)
  if offset < queue.from or offset >= queue.upto then
    local from = backwards and math.max(queue.head, offset - 63) or offset
    queue.bytes = redis.call("GETRANGE", queue.key, from, from + 63)
    queue.from, queue.upto = from, from + #queue.bytes
  end
  return string.byte(queue.bytes, offset - queue.from + 1)
end

local function gap_at(queue, offset)
  local gap, scale, byte = 0, 1, nil
  repeat
    byte = byte_at(queue, offset)
    gap, scale, offset = gap + byte % 128 * scale, scale * 128, offset + 1
  until byte < 128
  return gap, offset
end

-- The gap that ends before an offset, and where it starts: the bytes before its last one have the high bit.
local function gap_before(queue, offset)
  local gap = byte_at(queue, offset - 1, true)
  offset = offset - 1
  while offset > queue.head and byte_at(queue, offset - 1, true) >= 128 do
    gap, offset = gap * 128 + byte_at(queue, offset - 1, true) % 128, offset - 1
  end
  return gap, offset
end

local function encoded(gap)
  if gap < 128 then
    return string.char(gap)
  end
  return string.char(gap % 128 + 128) .. encoded(math.floor(gap / 128))
end

local function write_anew(p, queue, gaps)
  local spare = math.max(16, math.floor(#gaps / 8))
  queue.head, queue.tail = HEADER_SIZE, HEADER_SIZE + #gaps
  queue.size = queue.tail + spare
  redis.call("SET", p.key, header(queue) .. gaps .. string.rep("\0", spare), "PX", digits(2 * p.window))
end

-- Puts stamps, none before the last one, at the queue's end; no queue: a new one.
local function append(p, queue, stamps)
  local gaps, last = {}, queue and queue.last or stamps[1]
  for i, stamp in ipairs(stamps) do
    gaps[i], last = encoded(stamp - last), stamp
  end
  if not queue then
    table.remove(gaps, 1) -- the first stamp is in the header
    queue = { first = stamps[1], count = 0 }
  end
  gaps = table.concat(gaps)
  queue.last, queue.count = last, queue.count + #stamps

  if not queue.tail then
    write_anew(p, queue, gaps)
  elseif queue.tail + #gaps > queue.size then
    local kept = queue.tail > queue.head and redis.call("GETRANGE", p.key, queue.head, queue.tail - 1) or ""
    write_anew(p, queue, kept .. gaps)
  else
    if gaps ~= "" then
      redis.call("SETRANGE", p.key, queue.tail, gaps)
    end
    queue.tail = queue.tail + #gaps
    redis.call("SETRANGE", p.key, 0, header(queue))
    redis.call("PEXPIRE", p.key, digits(2 * p.window))
  end
end

-- Takes the units at or after a stamp off the end, so many at most; gives the queue, nil when it is empty, and their
-- stamps in order.
local function take_from(queue, stamp, most)
  local backwards, taken = {}, {}
  while queue.count > 0 and queue.last >= stamp and #backwards < most do
    backwards[#backwards + 1] = queue.last
    queue.count = queue.count - 1
    if queue.count > 0 then
      local gap
      gap, queue.tail = gap_before(queue, queue.tail)
      queue.last = queue.last - gap
    end
  end
  for i = #backwards, 1, -1 do
    taken[#taken + 1] = backwards[i]
  end
  return queue.count > 0 and queue or nil, taken
end

local function check(p, now, cost, touch)
  local queue, dead = read(p), now - p.window
  if queue and queue.last <= dead then
    queue = nil
  end
  local live, reset_after = 0, 0
  if queue then
    local gap, before = nil, queue.count
    while queue.first <= dead do
      gap, queue.head = gap_at(queue, queue.head)
      queue.first, queue.count = queue.first + gap, queue.count - 1
    end
    live, reset_after = queue.count, queue.last + p.window - now
    if touch and before - live > MANY then
      redis.call("SETRANGE", p.key, 0, header(queue))
      redis.call("PEXPIRE", p.key, digits(2 * p.window))
    end
  end

  local allowed = live + cost <= p.limit
  local retry_after = 0
  if not allowed then
    if cost > p.limit then
      retry_after = -1
    else
      local stamp, offset, gap = queue.first, queue.head, nil
      for _ = 1, live + cost - p.limit - 1 do
        gap, offset = gap_at(queue, offset)
        stamp = stamp + gap
      end
      retry_after = stamp + p.window - now
    end
  end
  p.queue, p.left = queue, math.max(0, p.limit - live)
  return allowed, live, p.left, retry_after, reset_after
end

local function charge(p, now, cost)
  local queue, stamps, later = p.queue, {}, {}
  local newest = queue and math.max(queue.last, now) or now
  if queue and now < queue.last then
    queue, later = take_from(queue, now + 1, math.huge) -- the clock stepped back
  end
  for i = 1, cost do
    stamps[i] = now
  end
  for _, stamp in ipairs(later) do
    stamps[#stamps + 1] = stamp
  end
  append(p, queue, stamps)
  return p.left - cost, newest + p.window - now, now
end

local function refund(p, now, cost, charged_at, unique)
  local queue = charged_at + p.window > now and read(p)
  if not queue then
    return 0
  end
  local rest, taken, given, kept
  if unique == "" then
    rest, taken = take_from(queue, now - p.window + 1, cost)
    given, kept = #taken, {}
  else
    rest, taken = take_from(queue, charged_at, math.huge)
    given, kept = 0, {}
    for _, stamp in ipairs(taken) do
      if stamp == charged_at and given < cost then
        given = given + 1
      else
        kept[#kept + 1] = stamp
      end
    end
  end
  if given > 0 then
    if rest or kept[1] then
      append(p, rest, kept)
    else
      redis.call("DEL", p.key)
    end
  end
  return given
end

return { check = check, charge = charge, refund = refund }
