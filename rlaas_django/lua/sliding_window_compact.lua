--[[
  Sliding window log in a byte or two per unit: the verdicts of sliding_window.lua in a sixtieth of its memory.
  Version  3

  State  STRING at <key>, a queue; expires one and a half to two windows after the last charge. Its bytes, from 1:
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

  Numbers are in base 256, high digits first. A gap, from each unit to the next, is in base 128, low digits first, a
  high bit on all but the last byte.

  What every charge changes lies together, so that mostly it takes one read and one write. Pending gaps move to the body
  when there is no room for more, and the expiry is renewed when half a window of it has gone by.

  A unit is dead once it is a whole window old. `first` and `head` move past dead ones with the next charge, or when a
  refusal has passed many of them, so that none is passed again and again; the bytes before `head` are dropped when the
  spare is used up. So a request costs the same whatever the limit.

  The usual check and the usual charge make no function; what they do not need is in the sections after them.
]]
--# state
local start, last, stamp -- the bytes 1..96; and the stamps of the newest unit, and of the one that is in the way
local first, head -- if dead units had to be passed: as they are then

--# check
local dead = now - window
start, count, reset_after = call("GETRANGE", key, "0", "95"), 0, 0
local mark, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, q = string.byte(start, 15, 31)
last = mark == 1 and ((((k * 256 + l) * 256 + m) * 256 + n) * 256 + o) * 256 + q or dead
if last > dead then
  stamp, count = ((((a * 256 + b) * 256 + c) * 256 + d) * 256 + e) * 256 + f, ((g * 256 + h) * 256 + i) * 256 + j
  reset_after = last + window - now
  local ahead = cost > limit and 0 or count + cost - limit - 1
  if stamp <= dead or ahead > 0 then
    -- From the oldest unit on, past what is dead, to the one that is in the way. The pending gaps follow the body's.
    a, b, c, d, e, f, g, h = string.byte(start, 1, 8)
    head, first = ((a * 256 + b) * 256 + c) * 256 + d, stamp
    local tail, stored = ((e * 256 + f) * 256 + g) * 256 + h, count
    local offset, bytes, from, upto = head, nil, 0, 0
    while stamp <= dead or ahead > 0 do
      local gap, scale, digit = 0, 1, nil
      repeat
        if offset >= tail then
          bytes, from = start, tail - 33
        elseif offset >= upto then
          bytes, from, upto = call("GETRANGE", key, offset, offset + 63), offset - 1, offset + 64
        end
        digit, offset = string.byte(bytes, offset - from), offset + 1
        gap, scale = gap + digit % 128 * scale, scale * 128
      until digit < 128
      stamp, ahead = stamp + gap, ahead - 1
      if first <= dead then
        first, head, count = stamp, offset, count - 1
      end
    end
    if charge and stored - count > 64 then -- keep that they have been passed
      --> bytes
      --> queue
      --> parts
      -- A server that takes no writes still refuses.
      redis.pcall("SETRANGE", key, "0", start_of(head, tail, ends, first, count, last, pending))
    end
  end
else
  start = nil
end

--# wait
retry_after = stamp + window - now

--# charge
local gaps, size, ends
if start and now >= last then
  local gap = now - last
  gaps = ""
  while gap > 127 do
    local low = gap % 128
    gaps, gap = gaps .. string.char(low + 128), (gap - low) / 128
  end
  gaps = gaps .. string.char(gap)
  if cost > 1 then
    gaps = gaps .. string.rep("\0", cost - 1)
  end
  local a, b, c, d, e, f = string.byte(start, 9, 14)
  ends, size = ((((a * 256 + b) * 256 + c) * 256 + d) * 256 + e) * 256 + f, string.byte(start, 32)
end

reset_after, charged_at = window, now
if gaps and not first and size + #gaps <= 64 and ends >= now + 1.5 * window then
  -- `count` and `last` at once: v and w, x and y are their halves.
  local w, y = (count + cost) % 65536, now % 16777216
  local v, x = (count + cost - w) / 65536, (now - y) / 16777216
  call("SETRANGE", key, "21", string.char(
    (v - v % 256) / 256, v % 256, (w - w % 256) / 256, w % 256,
    (x - x % 65536) / 65536, (x % 65536 - x % 256) / 256, x % 256,
    (y - y % 65536) / 65536, (y % 65536 - y % 256) / 256, y % 256, size + #gaps)
    .. string.sub(start, 33, 32 + size) .. gaps)
else
  --> bytes
  if not start and cost == 1 then
    local bytes = in_6_bytes(now)
    call("SET", key, "\0\0\0\96\0\0\0\96" .. in_6_bytes(now + 2 * window) .. "\1" .. bytes .. "\0\0\0\1" .. bytes .. "\0",
      "PX", 2 * window)
  else
    --> queue
    if not start then
      write_anew(now, cost, now, string.rep("\0", cost - 1))
    else
      --> parts
      if gaps then
        --> append
      else
        --> insert
      end
    end
  end
end

--# append
count, pending = count + cost, pending .. gaps
if #pending > 64 and tail + #pending > call("STRLEN", key) then
  write_anew(first, count, now, (head < tail and call("GETRANGE", key, head, tail - 1) or "") .. pending)
else
  if #pending > 64 then
    call("SETRANGE", key, tail, pending)
    tail, pending = tail + #pending, ""
  end
  local renew = ends < now + 1.5 * window
  call("SETRANGE", key, "0", start_of(head, tail, renew and now + 2 * window or ends, first, count, now, pending))
  if renew then
    call("PEXPIRE", key, 2 * window)
  end
end

--# insert
-- The clock stepped back: the units go before those that are later.
--> gaps
local unit, offset, gap, behind = back(gaps, last, now, count)
local zeros = string.rep("\0", cost - 1)
if unit > now then
  first, gaps = now, zeros .. gap_bytes(unit - now) .. gaps
else
  gaps = string.sub(gaps, 1, offset) .. gap_bytes(now - unit) .. zeros .. gap_bytes(unit + gap - now)
    .. string.sub(gaps, behind + 1)
end
write_anew(first, count + cost, last, gaps)
reset_after = last + window - now

--# refund
--> state
start = call("GETRANGE", key, "0", "95")
if string.byte(start, 15) ~= 1 or charged_at <= now - window then
  return 0
end
--> bytes
--> queue
--> parts
--> gaps
local a, b, c, d, e, f, g, h, i, j = string.byte(start, 22, 31)
local count, given = ((a * 256 + b) * 256 + c) * 256 + d, 1
last = ((((e * 256 + f) * 256 + g) * 256 + h) * 256 + i) * 256 + j
if unique == "" then
  local unit, offset, _, _, steps = back(gaps, last, now - window, cost)
  given = steps
  if offset == 0 and unit > now - window and given < cost then
    given = given + 1 -- the first one too
  end
  last, gaps = unit, string.sub(gaps, 1, offset)
else
  local unit, offset, gap, behind = back(gaps, last, charged_at, count)
  if unit ~= charged_at then
    return 0
  end
  -- Units of one stamp have gaps of 0 between them. With the last of them goes the gap before, or after.
  while given < cost and string.byte(gaps, offset) == 0 do
    given, offset = given + 1, offset - 1
  end
  local rest, before = string.sub(gaps, behind + 1), nil
  if offset == 0 then
    first, gaps = unit + gap, rest
  else
    unit, offset, before = back(string.sub(gaps, 1, offset), unit, -1, 1)
    gaps = string.sub(gaps, 1, offset)
    if gap > 0 then
      gaps = gaps .. gap_bytes(before + gap) .. rest
    else
      last = unit
    end
  end
end
if given == count then
  call("DEL", key)
elseif given > 0 then
  write_anew(first, count - given, last, gaps)
end
return given

--# bytes
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

--# queue
local function start_of(head, tail, ends, first, count, last, pending)
  return in_4_bytes(head) .. in_4_bytes(tail) .. in_6_bytes(ends) .. "\1" .. in_6_bytes(first) .. in_4_bytes(count)
    .. in_6_bytes(last) .. string.char(#pending) .. pending
end

local function write_anew(first, count, last, gaps)
  local tail, pending, body = 96, gaps, ""
  if #gaps > 64 then
    tail, pending = 96 + #gaps, ""
    body = string.rep("\0", 64) .. gaps .. string.rep("\0", math.max(64, math.floor(#gaps / 8)))
  end
  call("SET", key, start_of(96, tail, now + 2 * window, first, count, last, pending) .. body, "PX", 2 * window)
end

--# parts
local a, b, c, d, e, f, g, h, i, j, k, l, m, n, _, o, q, r, s, t, u = string.byte(start, 1, 21)
local head, tail = head or ((a * 256 + b) * 256 + c) * 256 + d, ((e * 256 + f) * 256 + g) * 256 + h
local ends = ((((i * 256 + j) * 256 + k) * 256 + l) * 256 + m) * 256 + n
local first = first or ((((o * 256 + q) * 256 + r) * 256 + s) * 256 + t) * 256 + u
local pending = string.sub(start, 33, 32 + string.byte(start, 32))
if head >= tail then -- the body is used up
  pending, head, tail = string.sub(pending, head - tail + 1), 96, 96
end

--# gaps
local gaps = (head < tail and call("GETRANGE", key, head, tail - 1) or "") .. pending

local function gap_bytes(gap)
  if gap < 128 then
    return string.char(gap)
  end
  local low = gap % 128
  return string.char(low + 128) .. gap_bytes((gap - low) / 128)
end

-- From the newest unit back to the first that is no later than a stamp, so many steps at most: its stamp, where the
-- gap before it ends, the gap after it, where that ends, and the steps.
local function back(gaps, unit, stamp, most)
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
