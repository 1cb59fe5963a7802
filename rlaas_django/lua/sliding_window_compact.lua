--[[
  Sliding window log in a byte or two per unit: the verdicts of sliding_window.lua in a sixtieth of its memory.
  Version  5

  State    STRING at <key>, a queue; expires one and a half to two windows after the last charge. Its bytes, from 1:
             1..4    head     how many bytes are before the oldest gap in the body
             5..8    tail     how many bytes are before the end of the body's gaps
             9..14   ends     when the key expires, in ms
            15       mark     1, tells this layout from any other
            16..21   first    stamp in ms of the oldest unit
            22..25   count    how many units there are
            26..31   last     stamp in ms of the newest unit
            32       size     how many bytes are pending
            33..96   pending  the newest gaps
            97..     body     the gaps before them, and spare room: growth by SETRANGE doubles the memory

  check    key, now, at, limit, window, ttl, cost, capacity, charging
           -> count, wait, reset_after, start, units, last, first, head
           start is the bytes 1..96, nil when no unit is alive; first and head are nil when no gap had to be read
  charge   key, now, at, limit, window, ttl, cost, unique, start, units, last, first, head
           -> reset_after, charged_at, more_after
           more_after is nil where the oldest unit stays the one that the check found
  refund   key, now, at, limit, window, ttl, cost, unique, charged_at -> units taken back
  reset    key, now, window -> keys deleted

  Numbers are in base 256, high digits first. A gap, from each unit to the next, is in base 128, low digits first, a
  high bit on all but the last byte.

  What every charge changes lies together, so that mostly it takes one read and one write. Pending gaps move to the body
  when there is no room for more, and the expiry is renewed when half a window of it has gone by.

  A unit is dead once it is a whole window old. `first` and `head` move past dead units with the next charge, or when a
  refusal has passed more than 64 of them, so that none is passed again and again; the bytes before `head` are dropped
  when the spare room is used up. So a request costs the same whatever the limit.
]]
-- Returns the functions that most checks and charges do not need: to make them costs instructions, on every check.
--   queue("walk")    walk                                        1,400
--   queue("bytes")   in_6_bytes                                  2,200
--   queue("write")   start_of, write_anew, parts_of, gaps_of     5,000
--   queue("edit")    insert, take_back                          10,600
local function queue(need)
  if need == "walk" then
    -- Goes from the oldest unit on, past those that are dead, and past `ahead` units. Returns the stamp of the unit
    -- that it ends at, and first, head and units without the dead ones.
    return function(key, start, first, units, dead, ahead)
      local a, b, c, d, e, f, g, h = string.byte(start, 1, 8)
      local head, tail = ((a * 256 + b) * 256 + c) * 256 + d, ((e * 256 + f) * 256 + g) * 256 + h
      local stamp, offset, bytes, from, upto = first, head, nil, 0, 0
      while stamp <= dead or ahead > 0 do
        local gap, scale, digit = 0, 1, nil
        repeat
          if offset >= tail then -- the pending gaps follow the body's
            bytes, from = start, tail - 33
          elseif offset >= upto then
            bytes, from, upto = redis.call("GETRANGE", key, offset, offset + 63), offset - 1, offset + 64
          end
          digit, offset = string.byte(bytes, offset - from), offset + 1
          gap, scale = gap + digit % 128 * scale, scale * 128
        until digit < 128
        stamp, ahead = stamp + gap, ahead - 1
        if first <= dead then
          first, head, units = stamp, offset, units - 1
        end
      end
      return stamp, first, head, units
    end
  end

  local function in_4_bytes(number)
    local low = number % 65536
    local high, d = (number - low) / 65536, low % 256
    local b = high % 256
    return string.char((high - b) / 256, b, (low - d) / 256, d)
  end

  local function in_6_bytes(number)
    local low = number % 65536
    local f = low % 256
    return in_4_bytes((number - low) / 65536) .. string.char((low - f) / 256, f)
  end

  if need == "bytes" then
    return in_6_bytes
  end

  -- The bytes from 1 on, up to the last pending gap.
  local function start_of(head, tail, ends, first, units, last, pending)
    return in_4_bytes(head) .. in_4_bytes(tail) .. in_6_bytes(ends) .. "\1" .. in_6_bytes(first) .. in_4_bytes(units)
      .. in_6_bytes(last) .. string.char(#pending) .. pending
  end

  local function write_anew(key, now, window, ttl, first, units, last, gaps)
    local tail, pending, body = 96, gaps, ""
    if #gaps > 64 then
      tail, pending = 96 + #gaps, ""
      body = string.rep("\0", 64) .. gaps .. string.rep("\0", math.max(64, math.floor(#gaps / 8)))
    end
    redis.call("SET", key, start_of(96, tail, now + 2 * window, first, units, last, pending) .. body, "PX", ttl)
  end

  -- Returns head, tail, ends, first and pending; head and first as given, if a walk moved them.
  local function parts_of(start, first, head)
    local a, b, c, d, e, f, g, h, i, j, k, l, m, n, _, o, q, r, s, t, u = string.byte(start, 1, 21)
    local tail = ((e * 256 + f) * 256 + g) * 256 + h
    local ends = ((((i * 256 + j) * 256 + k) * 256 + l) * 256 + m) * 256 + n
    local pending = string.sub(start, 33, 32 + string.byte(start, 32))
    head = head or ((a * 256 + b) * 256 + c) * 256 + d
    first = first or ((((o * 256 + q) * 256 + r) * 256 + s) * 256 + t) * 256 + u
    if head >= tail then -- the body is used up
      pending, head, tail = string.sub(pending, head - tail + 1), 96, 96
    end
    return head, tail, ends, first, pending
  end

  local function gaps_of(key, head, tail, pending)
    return (head < tail and redis.call("GETRANGE", key, head, tail - 1) or "") .. pending
  end

  if need == "write" then
    return start_of, write_anew, parts_of, gaps_of
  end

  local function gap_in_bytes(gap)
    if gap < 128 then
      return string.char(gap)
    end
    local low = gap % 128
    return string.char(low + 128) .. gap_in_bytes((gap - low) / 128)
  end

  -- Goes from the newest unit back to the first that is no later than a stamp, `most` steps at most. Returns its stamp,
  -- where the gap before it ends, the gap after it, where that ends, and the steps.
  local function walk_back(gaps, unit, stamp, most)
    local offset, gap, behind, steps = #gaps, 0, #gaps, 0
    while offset > 0 and unit > stamp and steps < most do
      gap, behind, offset = string.byte(gaps, offset), offset, offset - 1
      while offset > 0 and string.byte(gaps, offset) > 127 do
        gap, offset = gap * 128 + string.byte(gaps, offset) - 128, offset - 1
      end
      unit, steps = unit - gap, steps + 1
    end
    return unit, offset, gap, behind, steps
  end

  -- Puts units before those that are later than now: the clock stepped back. Returns when the oldest unit is dead.
  local function insert(key, now, window, ttl, cost, start, units, last, first, head)
    local head, tail, _, first, pending = parts_of(start, first, head)
    local gaps, zeros = gaps_of(key, head, tail, pending), string.rep("\0", cost - 1)
    local unit, offset, gap, behind = walk_back(gaps, last, now, units)
    if unit > now then
      first, gaps = now, zeros .. gap_in_bytes(unit - now) .. gaps
    else
      gaps = string.sub(gaps, 1, offset) .. gap_in_bytes(now - unit) .. zeros .. gap_in_bytes(unit + gap - now)
        .. string.sub(gaps, behind + 1)
    end
    write_anew(key, now, window, ttl, first, units + cost, last, gaps)
    return first + window - now
  end

  -- Returns gaps, first and last without the newest `cost` units that are alive, and how many these are.
  local function without_newest(gaps, first, last, dead, cost)
    local unit, offset, _, _, steps = walk_back(gaps, last, dead, cost)
    if offset == 0 and unit > dead and steps < cost then
      steps = steps + 1 -- the first one too
    end
    return string.sub(gaps, 1, offset), first, unit, steps
  end

  -- Returns gaps, first and last without `cost` units of one stamp, and how many there were.
  local function without_stamp(gaps, first, last, stamp, cost, units)
    local unit, offset, gap, behind = walk_back(gaps, last, stamp, units)
    if unit ~= stamp then
      return gaps, first, last, 0
    end
    -- Units of one stamp have gaps of 0 between them. With the last of them goes the gap before, or after.
    local found = 1
    while found < cost and string.byte(gaps, offset) == 0 do
      found, offset = found + 1, offset - 1
    end
    local rest, before = string.sub(gaps, behind + 1), nil
    if offset == 0 then
      return rest, unit + gap, last, found
    end
    unit, offset, before = walk_back(string.sub(gaps, 1, offset), unit, -1, 1)
    gaps = string.sub(gaps, 1, offset)
    if gap > 0 then
      return gaps .. gap_in_bytes(before + gap) .. rest, first, last, found
    end
    return gaps, first, unit, found
  end

  local function take_back(key, now, window, ttl, cost, unique, charged_at, start)
    local head, tail, _, first, pending = parts_of(start)
    local gaps = gaps_of(key, head, tail, pending)
    local a, b, c, d, e, f, g, h, i, j = string.byte(start, 22, 31)
    local units, refunded = ((a * 256 + b) * 256 + c) * 256 + d, nil
    local last = ((((e * 256 + f) * 256 + g) * 256 + h) * 256 + i) * 256 + j
    if unique == "" then
      gaps, first, last, refunded = without_newest(gaps, first, last, now - window, cost)
    else
      gaps, first, last, refunded = without_stamp(gaps, first, last, charged_at, cost, units)
    end
    if refunded == units then
      redis.call("DEL", key)
    elseif refunded > 0 then
      write_anew(key, now, window, ttl, first, units - refunded, last, gaps)
    end
    return refunded
  end

  return insert, take_back
end

local function check(key, now, at, limit, window, ttl, cost, capacity, charging)
  local dead, start = now - window, redis.call("GETRANGE", key, "0", "95")
  local mark, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, q = string.byte(start, 15, 31)
  local last = mark == 1 and ((((k * 256 + l) * 256 + m) * 256 + n) * 256 + o) * 256 + q or dead
  if last <= dead then
    return 0, -1, 0
  end
  local stamp, units = ((((a * 256 + b) * 256 + c) * 256 + d) * 256 + e) * 256 + f, ((g * 256 + h) * 256 + i) * 256 + j
  local first, head
  local ahead = cost > limit and 0 or units + cost - limit - 1
  if stamp <= dead or ahead > 0 then
    local stored = units
    local walk = queue("walk")
    stamp, first, head, units = walk(key, start, stamp, units, dead, ahead)
    if charging and stored - units > 64 then -- keep that they have been passed
      local start_of, _, parts_of = queue("write")
      local from, tail, ends, _, pending = parts_of(start, first, head)
      -- A server that takes no writes still refuses.
      redis.pcall("SETRANGE", key, "0", start_of(from, tail, ends, first, units, last, pending))
    end
  end
  return units, stamp + window - now, last + window - now, start, units, last, first, head
end

local function charge(key, now, at, limit, window, ttl, cost, unique, start, units, last, first, head)
  if not start then
    if cost == 1 then -- as the first charge mostly is; writes what write_anew would
      local in_6_bytes = queue("bytes")
      local ends, stamp = in_6_bytes(now + 2 * window), in_6_bytes(now)
      redis.call("SET", key, "\0\0\0\96\0\0\0\96" .. ends .. "\1" .. stamp .. "\0\0\0\1" .. stamp .. "\0", "PX", ttl)
    else
      local _, write_anew = queue("write")
      write_anew(key, now, window, ttl, now, cost, now, string.rep("\0", cost - 1))
    end
    return window, now, window
  elseif now < last then
    local insert = queue("edit")
    return last + window - now, now, insert(key, now, window, ttl, cost, start, units, last, first, head)
  end

  local gap, gaps = now - last, ""
  while gap > 127 do
    local low = gap % 128
    gaps, gap = gaps .. string.char(low + 128), (gap - low) / 128
  end
  gaps = gaps .. string.char(gap)
  if cost > 1 then
    gaps = gaps .. string.rep("\0", cost - 1)
  end
  local a, b, c, d, e, f = string.byte(start, 9, 14)
  local ends, size = ((((a * 256 + b) * 256 + c) * 256 + d) * 256 + e) * 256 + f, string.byte(start, 32)
  local renew = ends < now + 1.5 * window
  units = units + cost

  if not first and not renew and size + #gaps <= 64 then
    -- `count` and `last` at once: v and w, x and y are their halves.
    local w, y = units % 65536, now % 16777216
    local v, x = (units - w) / 65536, (now - y) / 16777216
    redis.call("SETRANGE", key, "21", string.char(
      (v - v % 256) / 256, v % 256, (w - w % 256) / 256, w % 256,
      (x - x % 65536) / 65536, (x % 65536 - x % 256) / 256, x % 256,
      (y - y % 65536) / 65536, (y % 65536 - y % 256) / 256, y % 256, size + #gaps)
      .. string.sub(start, 33, 32 + size) .. gaps)
    return window, now
  end

  local start_of, write_anew, parts_of, gaps_of = queue("write")
  local head, tail, _, first, pending = parts_of(start, first, head)
  pending = pending .. gaps
  if #pending > 64 and tail + #pending > redis.call("STRLEN", key) then
    write_anew(key, now, window, ttl, first, units, now, gaps_of(key, head, tail, pending))
    return window, now
  end
  if #pending > 64 then
    redis.call("SETRANGE", key, tail, pending)
    tail, pending = tail + #pending, ""
  end
  if renew then
    ends = now + 2 * window
  end
  redis.call("SETRANGE", key, "0", start_of(head, tail, ends, first, units, now, pending))
  if renew then
    redis.call("PEXPIRE", key, ttl)
  end
  return window, now
end

local function refund(key, now, at, limit, window, ttl, cost, unique, charged_at)
  local start = redis.call("GETRANGE", key, "0", "95")
  if string.byte(start, 15) ~= 1 or charged_at <= now - window then
    return 0
  end
  local _, take_back = queue("edit")
  return take_back(key, now, window, ttl, cost, unique, charged_at, start)
end

local function reset(key)
  return redis.call("DEL", key)
end

return check, charge, refund, reset
