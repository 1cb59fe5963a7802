--[[
  Adds statistics to one key, keeps it within its bound, and gives it its expiry.
  Version  2

  KEYS   the key
  ARGV   now, what it is, TTL in s, the most it may hold, then
           counts   field and increment of a HASH
           ranks    member and increment of a ZSET; the highest are kept
           levels   member and score of a ZSET; the highest are kept
           lines    items of a LIST, put in front; the newest are kept
]]
local what, most = ARGV[2], tonumber(ARGV[4])

if what == "lines" then
  for i = 5, #ARGV do
    call("LPUSH", KEYS[1], ARGV[i])
  end
  call("LTRIM", KEYS[1], 0, most - 1)
else
  for i = 5, #ARGV, 2 do
    if what == "counts" then
      call("HINCRBY", KEYS[1], ARGV[i], ARGV[i + 1])
    else
      call(what == "ranks" and "ZINCRBY" or "ZADD", KEYS[1], ARGV[i + 1], ARGV[i])
    end
  end
  if what ~= "counts" then
    call("ZREMRANGEBYRANK", KEYS[1], 0, -most - 1)
  end
end
call("EXPIRE", KEYS[1], ARGV[3])
return 1
