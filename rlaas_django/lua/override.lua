--[[
  Replaces the overrides of an identity, with their expiry, in one step: a block must not lapse while it is rewritten.
  Version  4

  KEYS   the identity's override key
  ARGV   now in ms ('': the server's clock), when the last override ends in ms, then field and value of each override;
         with none, the key is deleted
]]
local call, key, now = redis.call, KEYS[1], ARGV[1]
-- Never deleted before it is written: on a Cluster node that migrates its slot, a deleted key cannot be written again.
if not ARGV[3] then
  call("DEL", key)
  return 1
end
if now == "" then
  local time = call("TIME") -- seconds, and µs
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local kept = {}
for i = 3, #ARGV, 2 do
  kept[ARGV[i]] = true
end
call("HSET", key, unpack(ARGV, 3))
for _, field in ipairs(call("HKEYS", key)) do
  if not kept[field] then
    call("HDEL", key, field)
  end
end
call("PEXPIRE", key, math.max(1, ARGV[2] - now))
return 1
